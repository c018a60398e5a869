"""`validate` estimates a run's device hours: from an earlier run, or from its trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.driving.cost import DeviceSums
from draftmill.jobs.forecasting.validate import estimate_from
from tests.runs.jobs_of_tests import write_rows, write_spec


def test_without_a_source_there_is_no_estimate() -> None:
    assert estimate_from(DeviceSums(), 100, 200, "a run of a version that did not count") is None
    assert estimate_from(DeviceSums(up_s=1.0), 0, 200, "an empty run") is None


def test_an_estimate_scales_what_its_source_took() -> None:
    took = DeviceSums(up_s=50.0, loading_s=10.0, busy_s=36.0, counted_s=30.0)
    found = estimate_from(took, 100, 250, "the run x")
    assert found is not None
    assert (found.sums.up_s, found.sums.loading_s, found.sums.counted_s) == (125.0, 25.0, 75.0)


def test_a_recurring_job_is_estimated_from_its_last_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", 8)
    base = {"path": f"{tmp_path}/runs/{{date:%Y-%m-%d}}", "unit_rows": 4}
    spec = write_spec(tmp_path, rows=tmp_path / "rows.jsonl", output=base)
    assert main(["validate", str(spec), "--logical-date", "2026-11-20"]) == 0
    out = capsys.readouterr().out
    assert "from the trial on this machine, without loading and idle time" in out
    assert main(["run", str(spec), "--local", "--quiet", "--logical-date", "2026-11-20"]) == 0
    assert "estimate" not in capsys.readouterr().out, "what a run cost is measured"
    write_rows(tmp_path / "rows.jsonl", 16, seed=1)
    assert main(["validate", str(spec), "--logical-date", "2026-11-21"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("devices")]
    assert line.endswith("from the run 2026-11-20") and " loading, " in line
    assert main(["run", str(spec), "--local", "--quiet", "--logical-date", "2026-11-21"]) == 0
    capsys.readouterr()
    assert main(["validate", str(spec), "--logical-date", "2026-11-21"]) == 0
    assert "from 16 samples that this run has decoded" in capsys.readouterr().out
    other = ["--set", "decoder={kind: any_subset}", "--logical-date", "2026-11-22"]
    assert main(["validate", str(spec), *other]) == 0
    assert "from the trial on this machine" in capsys.readouterr().out, "another job is no source"
