"""The estimate of a run: from an earlier one or from its first units, made once, and compared with what the run took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.actors.messages import Receipt, Tally
from draftmill.jobs.cli import main
from draftmill.jobs.driving.device_time import DeviceSums, DeviceTime
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.forecasting.validate import price_text
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.waiting import UnitSize
from draftmill.jobs.spec.job_spec import check_spec
from draftmill.jobs.watching.estimate import (
    Estimate,
    EstimateWatcher,
    estimate_from,
    estimate_rows,
    per_million_text,
    read_estimate,
)
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import open_store
from tests.jobs.driving.test_device_time import Hand
from tests.runs.jobs_of_tests import write_rows, write_spec


def receipt(unit: int, spent_s: float) -> Receipt:
    return Receipt(unit, unit, "w0", "n", None, Tally(rows=1, new_tokens=8), spent_s=spent_s)


def watch(store: Store, clock: Hand, earlier: Estimate | None = None) -> tuple[EstimateWatcher, Totals, Scheduler]:
    """A run of 20 units of 10 tokens each, whose worker loaded for 7 s."""
    scheduler = Scheduler([UnitSize(unit, 1, 10) for unit in range(20)], workers=1)
    totals = Totals(units=20, rows=20, clock=clock, devices=DeviceTime(clock))
    totals.devices.up("w0", load_s=7.0)
    return EstimateWatcher(store, 200, earlier=earlier), totals, scheduler


def test_a_run_is_estimated_once_from_its_first_units() -> None:
    store = open_store("memory://estimate-first")
    watcher, totals, scheduler = watch(store, Hand())
    watcher.look(totals, scheduler)
    assert read_estimate(store) is None
    watcher.committed(receipt(3, 2.5))  # 5 % of the tokens
    watcher.look(totals, scheduler)
    found = read_estimate(store)
    assert found is not None and found.device_s == pytest.approx(7.0 + 2.5 * 20)
    assert found.source == "this run's first 1 of 20 units" and found.tokens == pytest.approx(8 * 20)
    watcher.committed(receipt(4, 99.0))
    watcher.look(totals, scheduler)
    later, totals, scheduler = watch(store, Hand())  # a resumed session
    later.committed(receipt(5, 99.0))
    later.look(totals, scheduler)
    assert read_estimate(store) == found


def test_an_earlier_run_is_the_better_source() -> None:
    store = open_store("memory://estimate-earlier")
    earlier = estimate_from(DeviceSums(up_s=50.0), 100, 200, "the run 2026-11-21")
    watcher, totals, scheduler = watch(store, Hand(), earlier)
    watcher.look(totals, scheduler)
    found = read_estimate(store)
    assert found is not None and (found.device_s, found.source) == (100.0, "the run 2026-11-21")


def test_without_a_source_there_is_no_estimate() -> None:
    assert estimate_from(DeviceSums(), 100, 200, "a run of a version that did not count") is None
    assert estimate_from(DeviceSums(up_s=1.0), 0, 200, "an empty run") is None
    assert estimate_rows(None, 10.0) == []
    store = open_store("memory://estimate-torn")
    store.put("log/estimate.json", b'{"device_s": 3')
    assert read_estimate(store) is None


def test_an_estimate_scales_what_its_source_took_and_made() -> None:
    took = DeviceSums(up_s=50.0, loading_s=10.0, busy_s=36.0, counted_s=30.0, priced_s=50.0, cost=5.0)
    found = estimate_from(took, 100, 250, "the run x", tokens=40)
    assert found is not None and (found.device_s, found.tokens) == (125.0, 100.0)
    assert found.sums is not None and (found.sums.loading_s, found.sums.counted_s) == (25.0, 75.0)
    assert per_million_text(found, 36.0) == " (12,500.00 per million tokens of ok samples)"  # 1.25 for 100 tokens
    assert per_million_text(estimate_from(took, 100, 250, "x") or found, 36.0) == "", (
        "no tokens known, no price of them"
    )


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
    assert price_text(spec, Estimate(7200.0, "the run x", "", 100_000.0)) == said
    assert price_text(spec, None) == ("unknown" if workers else "")


@pytest.mark.parametrize(("actual_s", "said"), [(0.0, ""), (3600.0, "; 100% too high"), (14400.0, "; 50% too low")])
def test_the_error_is_said_once_the_run_has_ended(actual_s: float, said: str) -> None:
    rows = estimate_rows(Estimate(7200.0, "the run x", ""), actual_s, 1.5)
    assert rows == [("estimate", f"2 h of device time, cost 3.00, from the run x{said}")]


def test_a_recurring_job_is_estimated_from_its_last_run_and_says_how_far_that_was_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not estimate_rows(Estimate(7.0, "the run x", ""), 5.0), "of seconds nobody needs an estimate"
    monkeypatch.setattr("draftmill.jobs.watching.estimate.WORTH_S", 0.0)
    write_rows(tmp_path / "rows.jsonl", 8)
    base = {"path": f"{tmp_path}/runs/{{date:%Y-%m-%d}}", "unit_rows": 4}
    spec = write_spec(tmp_path, rows=tmp_path / "rows.jsonl", output=base, workers={"price_per_hour": 2.0})
    assert main(["validate", str(spec), "--logical-date", "2026-11-20"]) == 0
    out = capsys.readouterr().out
    assert "from the trial on this machine, without loading and idle time" in out
    (line,) = [line for line in out.splitlines() if line.startswith("cost ")]
    assert line.endswith("per million tokens of ok samples)")
    assert main(["run", str(spec), "--local", "--quiet", "--logical-date", "2026-11-20"]) == 0
    write_rows(tmp_path / "rows.jsonl", 16, seed=1)
    capsys.readouterr()
    assert main(["validate", str(spec), "--logical-date", "2026-11-21"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("devices")]
    assert line.endswith("from the run 2026-11-20") and " loading, " in line
    assert main(["run", str(spec), "--local", "--quiet", "--logical-date", "2026-11-21"]) == 0
    out = capsys.readouterr().out
    (said,) = [line for line in out.splitlines() if line.strip().startswith("estimate")]
    first, second = (open_store(str(tmp_path / "runs" / day)) for day in ("2026-11-20", "2026-11-21"))
    estimate = json.loads(second.get("log/estimate.json"))
    tokens = [json.loads(store.get("_plan.json"))["totals"]["tokens"] for store in (first, second)]
    took_s = [
        json.loads(store.get("attempts/epoch-0001-session.jsonl"))["devices"]["up_s"] for store in (first, second)
    ]
    assert estimate["source"] == "the run 2026-11-20"
    assert estimate["device_s"] == pytest.approx(took_s[0] * tokens[1] / tokens[0])
    error = estimate["device_s"] / took_s[1] - 1
    assert said.endswith(f"; {abs(error):.0%} too {'high' if error >= 0 else 'low'}")
    assert main(["validate", str(spec), "--logical-date", "2026-11-21"]) == 0
    assert "from 16 samples that this run has decoded" in capsys.readouterr().out
    other = ["--set", "decoder={kind: any_subset}", "--logical-date", "2026-11-22"]
    assert main(["validate", str(spec), *other]) == 0
    assert "from the trial on this machine" in capsys.readouterr().out, "another job is no source"
