"""What a list of runs shows of each: its state, date and sums, read without its results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from draftmill.jobs.driving.run_log import read_sessions
from draftmill.jobs.finished.passes import PRUNED, left_failed, passes_of
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.recurring.runs_below import FoundRun
from draftmill.jobs.spec.dated_path import read_date, written
from draftmill.jobs.spec.thresholds import hopeless, too_many_failed
from draftmill.storage.errors import DamagedRun
from draftmill.storage.runs.commit import done_units
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import S3Options

State = Literal["finished", "failed", "running", "interrupted", "damaged"]
"""failed: too many samples failed (exit code 3). interrupted: not finished, and no driver works on it."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run. `date` is its logical date, or else when it was planned; numbers are None where they are not known.

    `failed` counts the samples that are still failed after the last finished pass. `is_pruned`: its results were deleted.
    """

    run: str
    name: str
    job: str | None
    state: State
    logical_date: str | None
    planned_at: str | None
    units: int | None
    units_done: int | None
    samples: int | None
    failed: int | None
    driver: str | None
    is_success: bool
    is_pruned: bool

    @property
    def date(self) -> str | None:
        """The logical date, or else when it was planned."""
        return self.logical_date or self.planned_at

    def data(self) -> dict[str, Any]:
        """The facts as JSON data."""
        return asdict(self)


def facts_of(run: FoundRun, *, s3: S3Options | None = None) -> RunFacts:
    """The facts of a run."""
    driver = driver_of(run.store)
    try:
        plan = load_plan(run.store)
        if plan is None:
            return _facts(run, None, "running" if driver else "interrupted", driver, None, None)
        if run.success is None:
            done = done_units(run.store, conditional=False) or done_units(run.store)
            return _facts(run, plan, _unfinished(run, plan, driver), driver, len(done), None)
        failed = failed_samples(run, s3=s3)
        is_bad = too_many_failed(failed, plan.rows, plan.spec.errors)
        return _facts(run, plan, "failed" if is_bad else "finished", driver, plan.units, failed)
    except (ValueError, KeyError, TypeError, DamagedRun):  # a UserError is a ValueError
        return _facts(run, None, "damaged", driver, None, None)


def failed_samples(run: FoundRun, *, s3: S3Options | None = None) -> int:
    """How many samples of a finished run are still failed."""
    if PRUNED in run.level.files:
        return int(json.loads(run.store.get(PRUNED))["failed"])
    return left_failed(passes_of(run.store, s3=s3))


def _unfinished(run: FoundRun, plan: Plan, driver: str | None) -> State:
    if driver:
        return "running"
    is_hopeless = hopeless(read_sessions(run.store).committed.failed, plan.rows, plan.spec.errors)
    return "failed" if is_hopeless else "interrupted"


def _facts(
    run: FoundRun, plan: Plan | None, state: State, driver: str | None, done: int | None, failed: int | None
) -> RunFacts:
    stat = run.level.files.get(PLAN)
    date = None if plan is None else plan.spec.output.logical_date
    return RunFacts(
        run=run.store.url,
        name=run.name or ".",
        job=None if plan is None else plan.spec.name,
        state=state,
        logical_date=None if date is None else written(read_date(date)),
        planned_at=None if stat is None or stat.mtime_s is None else written(datetime.fromtimestamp(stat.mtime_s, UTC)),
        units=None if plan is None else plan.units,
        units_done=done,
        samples=None if plan is None else plan.rows,
        failed=failed,
        driver=driver,
        is_success=run.success is not None,
        is_pruned=PRUNED in run.level.files,
    )
