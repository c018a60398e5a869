"""`draftmill catchup`: lists the dates of a recurring job that lack a finished run, and with --run runs them, oldest first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime

from draftmill.jobs.driving.ray_session import ray_session
from draftmill.jobs.exit_codes import INTERRUPTED, OK, code_of, severest
from draftmill.jobs.formatting import counted
from draftmill.jobs.recurring.catching_up import Due, dates_of
from draftmill.jobs.running.run import run_job
from draftmill.jobs.running.session import RunOptions
from draftmill.jobs.spec.dated_path import written
from draftmill.jobs.spec.job_spec import JobSpec, with_logical_date
from draftmill.storage.errors import StoreError, UserError


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
    found = dates_of(spec, datetime.now(UTC), first=first, last=last, every=every)
    due = [one for one in found if one.is_due]
    print("\n".join(lines_of(spec, found, due)), flush=True)
    if not run or not due:
        return OK
    with ExitStack() as stack:
        return run_all(spec, options, due, _starter(options, stack))


def lines_of(spec: JobSpec, found: Sequence[Due], due: Sequence[Due]) -> list[str]:
    """A line for each date, and a summary."""
    lines = [f"  {written(one.date).removesuffix('T00:00:00Z'):<20}  {one.state:<11}  {one.place}" for one in found]
    head = f"{spec.output.path}: {counted(len(found), 'date')}, {len(due):,} to run"
    if spec.input.since is not None:
        head += " (with input.since no date is missed: the next run takes all that is new)"
    return [head, *lines]


def run_all(spec: JobSpec, options: RunOptions, due: Sequence[Due], start: Callable[[], None]) -> int:
    """Run the dates one after another; returns the severest code. An interruption ends it, an error of one date does not."""
    codes = []
    for number, one in enumerate(due, start=1):
        date = written(one.date)
        print(f"date {number} of {len(due)}: {date}", flush=True)
        start()
        codes.append(_run(with_logical_date(spec, date), options))
        if codes[-1] == INTERRUPTED:
            break
    return severest(codes)


def _run(spec: JobSpec, options: RunOptions) -> int:
    try:
        return run_job(spec, options)
    except (UserError, StoreError) as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return code_of(error)


def _starter(options: RunOptions, stack: ExitStack) -> Callable[[], None]:
    """Starts or joins Ray before the first run, which the others then find up."""
    is_up = options.local

    def start() -> None:
        nonlocal is_up
        if not is_up:
            stack.enter_context(ray_session(options.ray_address, note=lambda message: _note(message, options)))
            is_up = True

    return start


def _note(message: str, options: RunOptions) -> None:
    if not options.quiet:
        print(message, file=sys.stderr)
