"""`draftmill catchup`: lists the dates of a recurring job that lack a finished run, and with --run runs them, oldest first.

Missed dates are run, and unfinished runs that can be continued are continued.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import dropwhile
from typing import Literal

from draftmill.jobs.driving.ray_session import ray_session
from draftmill.jobs.exit_codes import INTERRUPTED, OK, code_of, severest
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.recurring.new_inputs import difference, done_inputs
from draftmill.jobs.recurring.runs import FoundRun, State, facts_of, finished_runs, runs_of
from draftmill.jobs.running.run import run_job
from draftmill.jobs.running.session import RunOptions
from draftmill.jobs.spec.dated_path import base_of, floor_date, following, format_date, has_date, period_of, with_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date, with_logical_date
from draftmill.storage.errors import Error, UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.stores.store import open_store

MOST_DATES = 10_000

DateState = State | Literal["missed", "no data", "superseded"]
"""`no data`: there is no run, and nothing at the dated input path. superseded: not finished, but finished runs already read all
of its inputs, so that nothing is missing (`input.since`)."""


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
    are listed: the next run takes all that is new, so no date is missed. Dates before the first data of a dated input path are
    not listed. UserError if the path has no date, or for a wrong range.
    """
    path = spec.output.path
    if not has_date(path):
        raise UserError(f"{path!r} has no date; allowed: base/{{date:%Y-%m-%d}}", field="output.path")
    runs = runs_of(path, s3=spec.s3.options())
    if first is None and not runs:
        raise UserError("there is no run yet, so the first date is not known; allowed: a date", field="--from")
    start = floor_date(first, path) if first is not None else min(runs)
    end = following(floor_date(last, path), period_of(path)) if last is not None else floor_date(now, path)
    wanted = _planned_dates(start, end, period_of(path), every)
    if spec.input.since is not None:
        wanted = [date for date in runs if start <= date < end]
    dates = (Due(date, with_date(path, date), _state(spec, date, runs)) for date in sorted(wanted))
    return list(dropwhile(lambda due: due.state == "no data", dates))


def _planned_dates(start: datetime, end: datetime, period: str, every: int) -> list[datetime]:
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


def _state(spec: JobSpec, date: datetime, runs: dict[datetime, FoundRun]) -> DateState:
    if date not in runs:
        return "missed" if _has_data(spec, date) else "no data"
    state = facts_of(runs[date], s3=spec.s3.options()).state
    may_be_done = state == "interrupted" and spec.input.since is not None
    return "superseded" if may_be_done and _is_superseded(spec, runs[date]) else state


def _has_data(spec: JobSpec, date: datetime) -> bool:
    """Whether the input path or run of a date has something; not looked at if the input is the same for all dates."""
    given, s3 = at_date(spec, date).input, spec.s3.options()
    if given == spec.input:
        return True
    if given.run is not None:
        return is_closed(open_store(given.run, s3=s3))
    try:
        return bool(list_inputs(given.paths, s3=s3))
    except NothingThere:
        return False
    except UserError:  # the run of this date says what is wrong
        return True


def _is_superseded(spec: JobSpec, run: FoundRun) -> bool:
    plan, s3 = load_plan(run.store), spec.s3.options()
    if plan is None:
        return False
    base, finished = open_store(base_of(spec.output.path), s3=s3), finished_runs(spec.output.path, s3=s3)
    return not difference(plan.files, done_inputs(base, finished), runs=len(finished)).files


def catchup(
    spec: JobSpec,
    options: RunOptions,
    *,
    first: datetime | None = None,
    last: datetime | None = None,
    every: int = 1,
    run: bool = False,
) -> int:
    """Print the dates and their states, and with `run` run those that are due; returns the exit code."""
    dates = dates_of(spec, datetime.now(UTC), first=first, last=last, every=every)
    due = [date for date in dates if date.is_due]
    print("\n".join(_lines_of(spec, dates, due)), flush=True)
    if not run or not due:
        return OK
    with ExitStack() as stack:
        if not options.local:  # one Ray for all of the runs
            note = (lambda message: None) if options.quiet else partial(print, file=sys.stderr)
            stack.enter_context(ray_session(options.ray_address, note=note))
        return _run_all(spec, options, due)


def _lines_of(spec: JobSpec, dates: Sequence[Due], due: Sequence[Due]) -> list[str]:
    """A line for each date, and a summary."""
    lines = [
        f"  {format_date(date.date).removesuffix('T00:00:00Z'):<20}  {date.state:<11}  {date.place}" for date in dates
    ]
    head = f"{spec.output.path}: {counted(len(dates), 'date')}, {len(due):,} to run"
    if spec.input.since is not None:
        head += " (with input.since no date is missed: the next run takes all that is new)"
    return [head, *lines]


def _run_all(spec: JobSpec, options: RunOptions, due: Sequence[Due]) -> int:
    """Run the dates one after another; returns the severest code. An interruption ends it, an error of one date does not."""
    codes = []
    for number, entry in enumerate(due, start=1):
        date = format_date(entry.date)
        print(f"date {number} of {len(due)}: {date}", flush=True)
        codes.append(_run(with_logical_date(spec, date), options))
        if codes[-1] == INTERRUPTED:
            break
    return severest(codes)


def _run(spec: JobSpec, options: RunOptions) -> int:
    try:
        return run_job(spec, options)
    except Error as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return code_of(error)
