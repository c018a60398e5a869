"""Plans or resumes a job, decodes the missing units and closes the run. Idempotent.

    spec -> model, inputs -> Ray -> plan (new, or existing and compared) -> done set -> driver -> manifest, _SUCCESS

Checks the spec, the model, the inputs and the cluster's resources before it writes anything to the run directory.

`draftmill rerun --failed` decodes failed samples again in a new pass, or resumes such a pass. A pass is a run directory inside
the run's own (jobs/results/passes.py): planned, decoded, committed and closed like any run, under the run's lease; earlier
passes stay unchanged. The job must be the same; settings that may change between two runs may change here too. `draftmill
measure` measures metrics on the results of a finished run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime

from draftmill.jobs.config.dates import floor_date, following, format_date, has_date, period_of
from draftmill.jobs.config.spec import JobSpec, at_date, check_spec, with_logical_date
from draftmill.jobs.config.yaml_file import read_overrides
from draftmill.jobs.drive.backend import Backend, backend_of
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.leases import base_lease, gives_way, hold_lease
from draftmill.jobs.drive.log import print_result
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.exit_codes import INTERRUPTED, OK, Ended, code_of, severest
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.packing import PlanWriter, discard_parts
from draftmill.jobs.plan.plan import NothingLeft, Plan, create_plan, load_plan
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import Resolved, resolve
from draftmill.jobs.results.measure import (
    CheckedMetrics,
    kept_columns,
    measure_units,
    parse_metric,
    ready_for,
    ready_metrics,
    units_to_measure,
)
from draftmill.jobs.results.passes import (
    PRUNED,
    Pass,
    count_failed,
    failed_rows,
    finished_passes,
    pass_store,
    passes_of,
    require_plan,
)
from draftmill.jobs.results.run_input import with_run_rows
from draftmill.jobs.results.runs import FoundRun, base_store, facts_of, finished_runs, runs_of
from draftmill.jobs.results.summary import metric_lines
from draftmill.jobs.run.outcome import RunOutcome, close, judge
from draftmill.jobs.run.session import Run, RunOptions, decode
from draftmill.jobs.run.since import difference, done_inputs, new_files, runs_store, sifting, with_last_run
from draftmill.storage.errors import Error, UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.runs.lease import LeaseHeld
from draftmill.storage.stores.store import Place, Store, open_store, probe

_log = logging.getLogger(__name__)


def run_job(spec: JobSpec, options: RunOptions) -> int:
    """Run or resume a job, print how it ends, and return the exit code; raises what `complete_job` raises of other errors.

    AnotherDriver if another driver has a lease, unless `--if-running` says otherwise.
    """
    return _run_job(spec, options, StopFlag())


def _run_job(spec: JobSpec, options: RunOptions, stop: StopFlag) -> int:
    started, waited_for = datetime.now(UTC), None
    while True:
        try:
            complete_job(spec, options, started, stop)
        except LeaseHeld as held:
            if gives_way(held, options.if_running, waited_for):
                return OK
            waited_for = held.owner
        except NothingLeft as nothing:
            print_result(str(nothing))
            return OK
        except Ended as end:
            _log.error(str(end))
            return end.code
        else:
            return OK


def complete_job(spec: JobSpec, options: RunOptions, now: datetime | None = None, stop: StopFlag | None = None) -> str:
    """Run or resume a job until it is finished; returns its run directory.

    A date in the output path is filled in: the logical date of the spec, or else `now`; then the lease of the base path is held,
    too. Signals set `stop`, also one in the last unit, after which the run is finished. Raises UserError if the spec, an input or
    the directory is unusable, NothingLeft if no input is new, AnotherDriver if another driver has a lease, and Ended if it was
    interrupted or too many samples failed.
    """
    job, path, stop = at_date(spec, now or datetime.now(UTC)), spec.output.path, stop or StopFlag()
    with ExitStack() as stack:
        if has_date(path):
            stack.enter_context(base_lease(runs_store(spec, path), stop.set))
        store = open_store(job.place(job.output.path))
        job = with_last_run(job, store, path)
        outcome = stack.enter_context(RunOutcome(job, store))
        new_inputs = new_files(job, store, path)
        if new_inputs is not None:
            print_result(f"input.since: {new_inputs.text}")
            if not new_inputs.files:
                raise NothingLeft(f"nothing is new in {job.input.shown}; no run is started")
        with Display() as display:
            resolved = resolve(job, store, display, inputs=None if new_inputs is None else new_inputs.files)
        ready = ready_for(job, resolved.plan)
        if resolved.plan is not None and is_closed(store):
            if store.exists(PRUNED):
                print_result(f"{store.url} is already finished; its results were deleted by `draftmill prune`")
                return job.output.path
            print_result(f"{store.url} is already finished")
            measure_run(store, ready, options)
            close(job, store)
            return job.output.path
        backend = backend_of(address=options.ray_address, local=options.local)
        backend.check(job)
        probe(store)
        with hold_lease(store, stop.set) as lease, Display(outcome.log) as display, ExitStack() as ray:
            store.delete_strays()
            # Fail on missing resources before writing anything; where there may be nothing to do, plan without Ray.
            if resolved.plan is None and job.input.dedupe is None:
                (refusal,) = ray.enter_context(backend.opening(display, [resolved]))
                if refusal is not None:
                    raise refusal
            plan = resolved.plan or plan_run(resolved, store, backend, display, epoch=lease.epoch, path=path)
            run = Run(resolved, plan, options, lease, stop, display, backend, watchers=[outcome])
            decode(run)
            if ready is not None:
                measure_units(store, ready, backend=backend, display=display, stop=stop, grace_s=options.grace_s)
        close(job, store)
    return job.output.path


def decode_here(job: JobSpec, backend: Backend, check: Callable[[Resolved], None]) -> list[Pass]:
    """Run a small job in this process, and return its passes; `check` may refuse what was resolved. Prints no table. A signal
    ends it at once, with Ended: the caller keeps no part of it."""
    store, stop = open_store(job.output.path), StopFlag()
    backend.check(job)
    with hold_lease(store, stop.set) as lease, Display() as display:
        resolved = resolve(job, store, display)
        check(resolved)
        plan = make_plan(resolved, store, display, epoch=lease.epoch)
        decode(Run(resolved, plan, RunOptions(local=True, grace_s=0.0), lease, stop, display, backend))
    if stop.by_signal:
        raise Ended("interrupted", INTERRUPTED, by_signal=True)
    return passes_of(store)


def plan_run(resolved: Resolved, store: Store, backend: Backend, display: Display, *, epoch: int, path: str) -> Plan:
    """Plan the job; with `input.dedupe` without the rows whose ids finished runs have. NothingLeft if there are no others."""
    if resolved.spec.input.run is not None:
        resolved = with_run_rows(resolved, store)
    if resolved.spec.input.dedupe is None:
        return make_plan(resolved, store, display, epoch=epoch, survey=backend.survey(resolved, display))
    base = runs_store(resolved.spec, path)
    with sifting(base, finished_runs(base), display) as sift:
        return make_plan(resolved, store, display, epoch=epoch, sift=sift)


def measure_run(store: Store, ready: CheckedMetrics | None, options: RunOptions) -> None:
    """Measure what a finished run lacks, under its lease; nothing without metrics.

    Raises Ended if it is interrupted, AnotherDriver if another driver has the run.
    """
    if ready is None or not units_to_measure(store, ready):
        return
    backend = backend_of(address=options.ray_address, local=options.local)
    stop = StopFlag()
    with hold_lease(store, stop.set), Display() as display:
        store.delete_strays()
        measure_units(store, ready, backend=backend, display=display, stop=stop, grace_s=options.grace_s)


def measure(
    place: Place,
    words: Sequence[str],
    options: RunOptions,
    *,
    allow_code_execution: bool = False,
    reference: str | None = None,
) -> int:
    """Measure metrics, given as on the command line, on a finished run; returns the exit code."""
    store = open_store(place)
    fields = [f"--metric {word}" for word in words]
    metrics = [parse_metric(word, allow_code_execution=allow_code_execution) for word in words]
    passes = passes_of(store)
    finished_passes(passes)
    plan = passes[0].plan
    spec = plan.spec.with_s3(place.s3)
    ready = ready_metrics(metrics, fields, spec, kept_columns(plan), reference=reference)
    try:
        measure_run(store, ready, options)
    except KeyboardInterrupt:  # a signal before or after the units are measured; while they are, it only sets a flag
        _log.warning("interrupted; run it again to resume")
        return INTERRUPTED
    print_result("\n".join([f"draftmill: metrics of {plan.spec.name}", *metric_lines(store, plan.rows)]))
    return OK


def rerun(place: Place, options: RunOptions, *, overrides: Sequence[str] = ()) -> int:
    """Decode the failed samples of a finished run again, in a new pass; returns the exit code of the run as a whole.

    Raises UserError if the run is not finished, or if `overrides` (KEY=VALUE), the model or the inputs make it another job,
    and Ended as `complete_job` does.
    """
    store = open_store(place)
    # The place's S3 options apply to the workers, too.
    planned = require_plan(store).spec.with_s3(place.s3)
    spec = check_spec(planned.model_dump(mode="json"), read_overrides(overrides))
    finished_passes(passes_of(store))
    with Display() as display:
        resolved = resolve(spec, store, display)
    backend = backend_of(address=options.ray_address, local=options.local)
    backend.check(spec)
    probe(store)
    stop = StopFlag()
    with hold_lease(store, stop.set) as lease, Display() as display:
        passes = passes_of(store)  # read again: under the lease, no other driver can start a pass
        is_interrupted = passes[-1].manifest is None
        plan = passes[-1].plan if is_interrupted else plan_pass(passes, display, epoch=lease.epoch)
        if plan is None:
            print_result(f"{store.url}: no failed samples")
            judge(spec, passes)
            return OK
        decode(Run(resolved, plan, options, lease, stop, display, backend))
    measure_run(store, ready_for(spec, plan), options)
    close(spec, store, shown=-1)
    return OK


def plan_pass(passes: Sequence[Pass], display: Display, *, epoch: int) -> Plan | None:
    """Plan a pass over the failed rows of the last one, in their order; None if there are none."""
    if not count_failed(passes):
        return None
    first, last = passes[0].plan, passes[-1]
    store = pass_store(first.store, last.number + 1)
    unit_rows, window = first.spec.output.unit_rows, first.spec.batching.window
    writer = PlanWriter(store, window=window, unit_rows=unit_rows, keep_order=True, epoch=epoch)
    discard_parts(store, epoch)
    for table in failed_rows(last):
        writer.add(table)
    writer.finish()
    table, number = (writer.totals, writer.parts), last.number + 1
    plan = create_plan(store, first.spec, first.results, first.files, *table, pass_=number, keep=first.keep)
    display.note(f"pass {plan.pass_}: {counted(plan.rows, 'failed sample')} in {counted(plan.units, 'unit')}")
    return plan


# ---- `draftmill run --catch-up`: the dates of a recurring job that lack a finished run, oldest first

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
            stop = StopFlag()
            try:
                codes.append(_run_job(with_logical_date(spec, date), options, stop))
            except Error as error:
                _log.error(str(error))
                codes.append(code_of(error))
            if stop.by_signal and codes[-1] != INTERRUPTED and number < len(due):  # it came in the last unit
                _log.error(f"interrupted with {number} of {counted(len(due), 'date')} done; run it again to resume")
                codes.append(INTERRUPTED)
            if codes[-1] == INTERRUPTED:
                break
    return severest(codes)
