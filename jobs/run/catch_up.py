"""`draftmill run --catch-up`: runs the dates of a recurring job that lack a finished run, oldest first."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import UTC, datetime

from draftmill.jobs.config.dates import floor_date, following, format_date, has_date, period_of
from draftmill.jobs.config.spec import JobSpec, at_date, with_logical_date
from draftmill.jobs.drive.log import print_result
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.exit_codes import INTERRUPTED, code_of, severest
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.results.runs import FoundRun, base_store, facts_of, finished_runs, runs_of
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.jobs.run.since import difference, done_inputs
from draftmill.storage.errors import Error, UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.stores.store import open_store

_log = logging.getLogger(__name__)

MOST_DATES = 10_000


def due_dates(spec: JobSpec, now: datetime, first: datetime | None = None) -> list[datetime]:
    """The dates from `first` (default: that of the earliest run) to the last whole period that are missed or interrupted.

    A date without data at a dated input path is not missed. With `input.since` no date is: the next run takes all that is new.
    UserError if the output path has no date, or for a wrong `first`.
    """
    path = spec.output.path
    if not has_date(path):
        raise UserError(f"{path!r} has no date; allowed: base/{{date:%Y-%m-%d}}", field="output.path")
    runs = runs_of(spec.place(path))
    if first is None and not runs:
        raise UserError("there is no run yet, so the first date is not known; allowed: a date", field="--catch-up")
    date = floor_date(first, path) if first is not None else min(runs)
    end, wanted = floor_date(now, path), list[datetime]()
    while date < end:
        wanted += [date] if spec.input.since is None or date in runs else []
        date = following(date, period_of(path))
        if len(wanted) > MOST_DATES:
            raise UserError(
                f"{wanted[0]:%Y-%m-%d} gives more than {MOST_DATES:,} dates; allowed: a later one", field="--catch-up"
            )
    return [date for date in wanted if _is_due(spec, date, runs.get(date))]


def _is_due(spec: JobSpec, date: datetime, run: FoundRun | None) -> bool:
    """Whether the run of a date is missing, or can be continued."""
    if run is None:
        return _has_data(spec, date)
    return facts_of(run).state == "interrupted" and not (spec.input.since and _is_superseded(spec, run))


def _has_data(spec: JobSpec, date: datetime) -> bool:
    """Whether the input path or run of a date has something; not looked at if the input is the same for all dates."""
    dated = at_date(spec, date)
    if dated.input == spec.input:
        return True
    if dated.input.run is not None:
        return is_closed(open_store(spec.place(dated.input.run)))
    try:
        return bool(list_inputs(*dated.input_places))
    except NothingThere:
        return False
    except UserError:  # the run of this date says what is wrong
        return True


def _is_superseded(spec: JobSpec, run: FoundRun) -> bool:
    """Whether finished runs have read all inputs of an interrupted one meanwhile, so that nothing is missing."""
    plan = load_plan(run.store)
    if plan is None:
        return False
    base = base_store(spec.place(spec.output.path))
    finished = finished_runs(base)
    return not difference(plan.files, done_inputs(base, finished), runs=len(finished)).files


def catch_up(spec: JobSpec, options: RunOptions, first: datetime | None = None) -> int:
    """Run the due dates one after another, in one Ray; returns the severest exit code.

    An interruption ends it, an error of one date does not.
    """
    due, codes = due_dates(spec, datetime.now(UTC), first), list[int]()
    print_result(f"{spec.output.path}: {counted(len(due), 'date')} to run")
    own = due and not options.local
    with ray_session(options.ray_address, note=Display().note) if own else nullcontext():
        for number, date in enumerate(map(format_date, due), start=1):
            print_result(f"date {number} of {len(due)}: {date}")
            try:
                codes.append(run_job(with_logical_date(spec, date), options))
            except Error as error:
                _log.error(str(error))
                codes.append(code_of(error))
            if codes[-1] == INTERRUPTED:
                break
    return severest(codes)
