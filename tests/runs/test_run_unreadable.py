"""A job without one readable row, and a finished run that has lost a file."""

from draftmill.jobs.cli import main
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec


def test_a_job_without_a_readable_row_says_why_each_row_failed(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('x\n{"id": "a"},\n[3]\n')
    spec = write_spec(tmp_path, rows=rows, sampling={"n": 2})
    assert main(["run", str(spec), "--local"]) == 3
    assert "JSON lines have no comma at their end" in capsys.readouterr().out
    assert rows_of(tmp_path / "run")["status"].to_pylist() == ["failed"] * 6
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_lost_file_of_a_finished_run_is_named_with_the_remedy(tmp_path, capsys):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 4))
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    lost, run = tmp_path / "run" / "data" / "unit-00000000.parquet", str(tmp_path / "run")
    lost.unlink()
    remedy = "delete it, _manifest.json and _SUCCESS, and the next run repeats its unit"
    capsys.readouterr()
    assert main(["run", str(spec), "--local", "--quiet"]) == 0, "a finished run's results are not read again"
    assert main(["export", run, "--format", "jsonl", "--out", str(tmp_path / "x")]) == 2
    assert f"{lost} is damaged: it does not exist; {remedy}" in capsys.readouterr().err
    assert main(["verify", run]) == 1
    assert remedy in capsys.readouterr().out
    for name in ("_manifest.json", "_SUCCESS"):
        (tmp_path / "run" / name).unlink()
    assert main(["run", str(spec), "--local", "--quiet"]) == 0 and lost.exists()
    assert main(["verify", run]) == 0
