"""`validate` estimates a run's cost: from an earlier run, or from its trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.driving.cost import DeviceSums
from draftmill.jobs.forecasting.validate import Estimate, estimate_from, price_text
from draftmill.jobs.spec.job_spec import check_spec
from tests.runs.jobs_of_tests import write_rows, write_spec


def test_without_a_source_there_is_no_estimate() -> None:
    assert estimate_from(DeviceSums(), 100, 200, "a run of a version that did not count", tokens=0) is None
    assert estimate_from(DeviceSums(up_s=1.0), 0, 200, "an empty run", tokens=0) is None


def test_an_estimate_scales_what_its_source_took_and_made() -> None:
    took = DeviceSums(up_s=50.0, loading_s=10.0, busy_s=36.0, counted_s=30.0, priced_s=50.0, cost=5.0)
    found = estimate_from(took, 100, 250, "the run x", tokens=40)
    assert found is not None and (found.sums.up_s, found.tokens) == (125.0, 100.0)
    assert (found.sums.loading_s, found.sums.counted_s) == (25.0, 75.0)
    assert found.cost_text(36.0) == "~1.25 (12,500.00 per million tokens of ok samples)"
    unknown = estimate_from(took, 100, 250, "x", tokens=0)
    assert unknown is not None and unknown.cost_text(36.0) == "~1.25", "no tokens known, no price of them"


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ({}, ""),
        ({"price_per_hour": 1.5}, "~3.00 (30.00 per million tokens of ok samples)"),
        (
            [{"price_per_hour": 4}, {"price_per_hour": 1.5, "labels": {"a": "b"}}],
            "~3.00 to 8.00 (30.00 to 80.00 per million tokens of ok samples), by the kind of worker",
        ),
        ([{"price_per_hour": 4}, {"labels": {"a": "b"}}], "unknown: some kinds of workers have no price"),
    ],
)
def test_validate_says_what_an_estimate_costs(workers: Any, said: str) -> None:
    spec = check_spec(
        {
            "task": {"kind": "complete"},
            "input": {"path": "rows.jsonl"},
            "model": {"path": "builtin:ar-tiny"},
            "decoder": {"kind": "autoregressive"},
            "output": {"path": "run"},
            "workers": workers,
        }
    )
    assert price_text(spec, Estimate(DeviceSums(up_s=7200.0), "the run x", 100_000.0)) == said
    assert price_text(spec, None) == ("unknown" if workers else "")


def test_a_recurring_job_is_estimated_from_its_last_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", 8)
    base = {"path": f"{tmp_path}/runs/{{date:%Y-%m-%d}}", "unit_rows": 4}
    spec = write_spec(tmp_path, rows=tmp_path / "rows.jsonl", output=base, workers={"price_per_hour": 2.0})
    assert main(["validate", str(spec), "--logical-date", "2026-11-20"]) == 0
    out = capsys.readouterr().out
    assert "from the trial on this machine, without loading and idle time" in out
    (line,) = [line for line in out.splitlines() if line.startswith("cost ")]
    assert line.endswith("per million tokens of ok samples)")
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
