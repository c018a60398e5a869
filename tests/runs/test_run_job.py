"""Whole jobs on a real Ray in this process: results, resume, exit codes, status and verify."""

import json

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.runs.records import SCHEMA
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def finished(ray_session, tmp_path_factory: pytest.TempPathFactory):
    """A run of 20 samples in 5 units by two workers, with traces."""
    folder = tmp_path_factory.mktemp("job")
    rows = write_rows(folder / "rows.jsonl", 20)
    spec = write_spec(folder, rows=rows, output={"path": str(folder / "run"), "unit_rows": 4, "trace": "steps"})
    assert main(["run", str(spec), "--quiet"]) == 0
    return folder


def test_every_column_of_a_result_row_is_real(finished):
    rows = rows_of(finished / "run")
    assert rows.num_rows == 20 and set(rows.column("status").to_pylist()) == {"ok"}
    inputs = {row["id"]: row["tokens"] for row in map(json.loads, (finished / "rows.jsonl").read_text().splitlines())}
    for row in rows.to_pylist():
        given = inputs[row["id"]]
        masked = given.count(None)
        assert (row["new_tokens"], row["prompt_tokens"]) == (masked, len(given) - masked)
        assert len(row["tokens"]) == masked and row["finish"] == "filled" and row["text"] is None
        assert sum(fill["end"] - fill["start"] for fill in row["fills"]) == masked
        assert row["logprob"] <= 0 and min(1, masked) <= row["nfe"] <= masked
        assert sum(n * count for n, count in enumerate(row["accept_hist"])) == masked
        assert row["key"] > 0 and row["decoder"] == "assd" and row["drafter"] == "self"


def test_a_result_file_has_the_schema_and_says_whose_it_is(finished):
    import pyarrow.parquet as pq

    schema = pq.read_schema(finished / "run" / "data" / "unit-00000000.parquet")
    assert schema.remove_metadata().equals(SCHEMA)
    plan = json.loads((finished / "run" / "_plan.json").read_text())
    assert schema.metadata[b"draftmill.fingerprint"].decode() == plan["fingerprint"]


def test_traces_tell_every_iteration(finished):
    import pyarrow.parquet as pq

    trace = pq.read_table(finished / "run" / "traces").to_pylist()
    results = {row["id"]: row for row in rows_of(finished / "run").to_pylist()}
    for name, row in results.items():
        steps = sorted((step for step in trace if step["id"] == name), key=lambda step: step["iteration"])
        committed = dict(pair for step in steps for pair in zip(step["positions"], step["committed"], strict=True))
        assert [committed[position] for position in sorted(committed)] == row["tokens"]
        assert len(steps) == row["iterations"]


def test_missing_units_are_done_again_and_nothing_else(finished):
    run = finished / "run"
    expected = rows_of(run)
    kept = (run / "data" / "unit-00000000.parquet").stat().st_mtime_ns
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000003.parquet"):
        (run / name).unlink()
    assert main(["run", str(finished / "run.yaml"), "--quiet"]) == 0
    assert rows_of(run).equals(expected)
    assert (run / "data" / "unit-00000000.parquet").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_bad_rows_are_failed_rows_and_too_many_of_them_is_exit_code_3(ray_session, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 6)
    with rows.open("a") as file:
        file.write(
            '{"id": "torn", "tokens": [1, 2\n{"id": "text", "tokens": "abc"}\n{"id": "huge", "tokens": [99999]}\n'
        )
    spec = write_spec(tmp_path, rows=rows)
    assert main(["run", str(spec), "--quiet"]) == 3
    found = {row["id"]: row["error_kind"] for row in rows_of(tmp_path / "run").to_pylist()}
    assert sorted(filter(None, found.values())) == ["bad_json", "bad_tokens", "bad_tokens"]
    assert sum(kind is None for kind in found.values()) == 6
    assert main(["run", str(spec), "--quiet", "--set", "errors.max_rate=0.5"]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_folder_that_is_no_run_is_exit_code_2(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
