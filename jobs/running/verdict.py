"""What is printed of a run that ended, and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftmill.jobs.driving.run_log import read_sessions
from draftmill.jobs.exit_codes import INTERRUPTED, OK, TOO_MANY_FAILED, most_failed, too_many_failed
from draftmill.jobs.finished.passes import Pass, finished, left_failed, passes_of
from draftmill.jobs.finished.summary import metric_lines, read_summary, table_lines
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.schedule.events import Finish
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import StoreError, StoreFull
from draftmill.storage.runs.commit import SUCCESS, done_units, read_manifest
from draftmill.storage.stores.interface import Store


def close(spec: JobSpec, store: Store) -> int:
    """Print the table of a finished run; returns 0, or 3 if too many samples are still failed."""
    print_table(spec, store)
    passes = passes_of(store, s3=spec.s3.options())
    print_metrics(store, passes)
    return judge(spec, passes)


def print_metrics(store: Store, passes: Sequence[Pass]) -> None:
    """Print the means of a run's metrics, if any are measured."""
    if lines := metric_lines(store, passes[0].plan.rows):
        print("\n".join(["  metrics", *(f"  {line}" for line in lines)]))


def print_table(spec: JobSpec, store: Store) -> None:
    """Print the sums of one finished pass."""
    manifest = read_manifest(store)
    if manifest is None:
        raise StoreError(f"{store.url} has {SUCCESS} but no manifest")
    results = read_summary(store, (unit.object for unit in manifest.units))
    sessions = read_sessions(store)
    print("\n".join(table_lines(spec.name, store.url, manifest, results, sessions, done=spec.task.done)))


def judge(spec: JobSpec, passes: Sequence[Pass]) -> int:
    """Report the samples that are still failed after the finished passes; returns 0, or 3 if they are too many."""
    rows, failed, count = passes[0].plan.rows, left_failed(passes), len(finished(passes))
    if count > 1:
        print(f"  after {count} passes {rows - failed:,} of {rows:,} samples are ok, {failed:,} failed")
    if not too_many_failed(failed, rows, spec.errors):
        return OK
    most = most_failed(rows, spec.errors)
    print(
        f"draftmill: {failed:,} of {rows:,} samples failed, more than `errors` allows ({most:,}); see the table above",
        file=sys.stderr,
    )
    return TOO_MANY_FAILED


def broken_off(store: Store, plan: Plan, finish: Finish, *, conditional: bool) -> int:
    """Report how an unfinished run ended; returns the exit code."""
    if finish.how == "full":
        raise StoreFull(told_full(finish))
    if finish.how == "failed":
        raise StoreError(f"{finish.message}; run it again to resume")
    done = f"{len(done_units(store, conditional=conditional)):,} of {plan.units:,} units done"
    if finish.how == "hopeless":
        print(
            f"draftmill: stopped with {done}: {finish.message}; raise errors.max_rate or errors.max_count to continue",
            file=sys.stderr,
        )
        return TOO_MANY_FAILED
    print(f"draftmill: interrupted with {done}; run it again to resume", file=sys.stderr)
    return INTERRUPTED


def told_full(finish: Finish) -> str:
    """What to do about a full disk."""
    return f"{finish.message}; make room, then run it again to continue"


def without_ray(error: StoreError, store: Store) -> StoreError:
    """The same error, with a hint whether the run can be resumed."""
    planned = load_plan(store) is not None
    hint = "the plan is made: run it again to resume" if planned else "nothing has been written yet"
    return StoreError(f"{error}; {hint}")
