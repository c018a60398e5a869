"""The dates of a recurring job that lack a finished run: missed ones, and unfinished ones that can be continued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.recurring.new_inputs import difference, done_inputs
from draftmill.jobs.recurring.runs import DatedRun, State, facts_of, finished_below, runs_of
from draftmill.jobs.spec.dated_path import base_of, floored, following, has_date, period_of, with_date
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store

MOST_DATES = 10_000

DateState = State | Literal["missed", "superseded"]
"""superseded: not finished, but finished runs have had all of its inputs, so that nothing is missing (`input.since`)."""


@dataclass(frozen=True, slots=True)
class Due:
    """One date, the place of its run, and its state."""

    date: datetime
    place: str
    state: DateState

    @property
    def is_due(self) -> bool:
        """Whether a run for this date is missing, or can be continued."""
        return self.state in {"missed", "interrupted"}


def dates_of(
    spec: JobSpec, now: datetime, *, first: datetime | None = None, last: datetime | None = None, every: int = 1
) -> list[Due]:
    """The dates from `first` (default: that of the earliest run) to `last` (default: the last whole period), with their states.

    `every` is the distance of two dates, in periods of the output path's date. With `input.since` only dates that have a run
    are listed: the next run takes all that is new, so no date is missed. UserError if the path has no date, or for a wrong range.
    """
    path = spec.output.path
    if not has_date(path):
        raise UserError(f"{path!r} has no date; allowed: base/{{date:%Y-%m-%d}}", field="output.path")
    runs = {one.date: one for one in runs_of(path, s3=spec.s3.options())}
    if first is None and not runs:
        raise UserError("there is no run yet, so the first date is not known; allowed: a date", field="--from")
    start = floored(first, path) if first is not None else min(runs)
    end = following(floored(last, path), period_of(path)) if last is not None else floored(now, path)
    wanted = _planned(start, end, period_of(path), every)
    if spec.input.since is not None:
        wanted = [date for date in runs if start <= date < end]
    return [Due(date, with_date(path, date), _state(spec, date, runs)) for date in sorted(wanted)]


def _planned(start: datetime, end: datetime, period: str, every: int) -> list[datetime]:
    dates = []
    for number, date in enumerate(_each(start, end, period)):
        if number % every == 0:
            dates.append(date)
        if len(dates) > MOST_DATES:
            raise UserError(
                f"{start:%Y-%m-%d} gives more than {MOST_DATES:,} dates; allowed: a later one", field="--from"
            )
    return dates


def _each(start: datetime, end: datetime, period: str) -> Iterator[datetime]:
    date = start
    while date < end:
        yield date
        date = following(date, period)


def _state(spec: JobSpec, date: datetime, runs: dict[datetime, DatedRun]) -> DateState:
    if date not in runs:
        return "missed"
    found = facts_of(runs[date].run, s3=spec.s3.options()).state
    may_be_done = found == "interrupted" and spec.input.since is not None
    return "superseded" if may_be_done and _is_superseded(spec, runs[date]) else found


def _is_superseded(spec: JobSpec, run: DatedRun) -> bool:
    plan, s3 = load_plan(run.run.store), spec.s3.options()
    if plan is None:
        return False
    base, finished = open_store(base_of(spec.output.path), s3=s3), finished_below(spec.output.path, s3=s3)
    return not difference(plan.files, done_inputs(base, finished), runs=len(finished)).files
