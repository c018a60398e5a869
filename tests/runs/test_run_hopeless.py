"""A job of which more has failed than it may: stopped early with exit code 3, and finished once more is allowed; or all."""

import json

import pytest

from draftmill.jobs import exit_codes
from draftmill.jobs.cli import main
from draftmill.storage.runs.commit import SUCCESS, done_units
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import rows_of, write_spec
from tests.runs.local_pool import without_ray

ROWS = 240


@pytest.mark.slow
def test_a_hopeless_job_is_stopped_early_and_goes_on_when_more_is_allowed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exit_codes, "_HOPELESS", 20)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps({"id": f"row-{n}", "tokens": [7, None] if n % 2 else [99999]}) for n in range(ROWS))
    )
    spec, store = write_spec(tmp_path, rows=rows, errors={"max_rate": 0.1}), open_store(str(tmp_path / "run"))
    with without_ray():
        assert main(["run", str(spec), "--quiet"]) == 3
        assert " of 240 samples failed; errors.max_rate: 0.1 allows 24; raise it to continue" in capsys.readouterr().err
        assert 0 < len(done_units(store)) < ROWS // 4 and not store.exists(SUCCESS)
        done = len(done_units(store))
        assert main(["run", str(spec), "--quiet"]) == 3, "those that failed before count"
        assert done < len(done_units(store)) < done + 8
        assert main(["run", str(spec), "--quiet", "--set", "errors.max_rate=0.5"]) == 0
    assert rows_of(store).num_rows == ROWS


def test_a_job_without_a_readable_row_says_why_each_row_failed(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('x\n{"id": "a"},\n[3]\n')
    spec = write_spec(tmp_path, rows=rows, sampling={"n": 2})
    assert main(["run", str(spec), "--local", "--set", "errors.max_count=5"]) == 3
    printed = capsys.readouterr()
    assert "JSON lines have no comma at their end" in printed.out
    assert "6 of 6 samples failed; errors.max_count: 5 allows 5; see the table above" in printed.err
    assert main(["status", str(tmp_path / "run")]) == main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "  state    failed: 6 of 6 samples failed" in said and "run  failed  " in said
    assert rows_of(tmp_path / "run")["status"].to_pylist() == ["failed"] * 6
    assert main(["verify", str(tmp_path / "run")]) == 0
