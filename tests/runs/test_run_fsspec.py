"""A whole job whose inputs are in a bucket that fsspec reads."""

import pytest

from draftmill.jobs.cli import main
from tests.runs.jobs_of_tests import rows_of, unequal, write_rows, write_spec
from tests.storage.stores.fsspec_driver import register


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_job_has_the_rows_of_the_same_local_files(scheme, tmp_path, monkeypatch, capsys):
    driver = register(monkeypatch, scheme)
    write_rows(tmp_path / "1.jsonl", 6)
    text = write_rows(tmp_path / "2.jsonl", 6, seed=1).read_text()
    (tmp_path / "2.jsonl").write_text(text.replace("row-", "other-"))
    for file in tmp_path.glob("*.jsonl"):
        driver.pipe_file(f"bucket/in/{file.name}", file.read_bytes())
    columns = {"tokens": "tokens"}
    local = write_spec(tmp_path, rows=tmp_path, out="local", input={"path": f"{tmp_path}/*.jsonl", "columns": columns})
    there = write_spec(tmp_path, rows=tmp_path, input={"path": f"{scheme}://bucket/in", "columns": columns})
    for spec in (local, there):
        assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert unequal(rows_of(tmp_path / "run"), rows_of(tmp_path / "local")) == []
    driver.pipe_file("bucket/in/2.jsonl", (tmp_path / "2.jsonl").read_bytes())
    assert main(["run", str(there), "--local", "--quiet"]) == 2
    assert "2.jsonl (changed" in capsys.readouterr().err
