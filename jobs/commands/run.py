"""`draftmill run`: plans or resumes a job, decodes the missing units and closes the run. Idempotent.

    spec -> model, inputs -> Ray -> plan (new, or existing and compared) -> done set -> driver -> manifest, _SUCCESS

Checks the spec, the model, the inputs and the cluster's resources before it writes anything to the run directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import draftmill
from draftmill.actors.job import Crew
from draftmill.jobs.codes import INTERRUPTED, OK, TOO_MANY_FAILED, UNEXPECTED
from draftmill.jobs.driving.attempts import AttemptsLog, read_sessions
from draftmill.jobs.driving.crew import fitting_threads
from draftmill.jobs.driving.device_time import DeviceTime
from draftmill.jobs.driving.driver import Driver, StopFlag
from draftmill.jobs.driving.driver_log import DriverLog, LoggedDisplay
from draftmill.jobs.driving.progress import Display, make_display
from draftmill.jobs.driving.session import RayDidNotStart, is_connected
from draftmill.jobs.driving.site import ReadingSite, Site, WorkerPool, site_of
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.driving.watchers import Watcher, Watchers
from draftmill.jobs.finished.measure import measure_units
from draftmill.jobs.finished.measure_session import measure_run, say_interrupted
from draftmill.jobs.finished.metric_figures import metric_lines
from draftmill.jobs.finished.metric_ready import Ready, kept_in, ready_metrics
from draftmill.jobs.finished.passes import PRUNED, Pass, finished, left_failed, passes_of
from draftmill.jobs.finished.summary import read_summary, table_lines
from draftmill.jobs.notes import counted, size_text
from draftmill.jobs.plan.plan import NothingLeft, Plan, load_plan
from draftmill.jobs.plan.prepare import Prepared, make_plan, prepare, weight_bytes
from draftmill.jobs.plan.worker_job import make_job
from draftmill.jobs.recurring.earlier_cost import earlier_estimate
from draftmill.jobs.recurring.known_ids import sifting
from draftmill.jobs.recurring.name_lease import Held, IfRunning, name_lease, run_lease, when_free
from draftmill.jobs.recurring.new_inputs import base_path, new_files
from draftmill.jobs.recurring.runs_below import finished_below
from draftmill.jobs.schedule.events import Finish
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.jobs.schedule.unit_sizes import UnitSizes
from draftmill.jobs.spec.dated_path import base_of, has_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date
from draftmill.jobs.spec.places import check_places
from draftmill.jobs.spec.thresholds import hopeless, most_failed, too_many_failed
from draftmill.jobs.watching.ending import Ending, ended
from draftmill.jobs.watching.estimate import Estimate, EstimateWatcher, read_estimate
from draftmill.storage.errors import StoreError, StoreFull, UserError
from draftmill.storage.runs.commit import (
    SUCCESS,
    CommittedUnit,
    done_units,
    is_closed,
    read_manifest,
    read_record,
    read_unit,
    record_commit,
    write_manifest,
)
from draftmill.storage.runs.lease import Lease, LeaseLost, this_process
from draftmill.storage.runs.unit_facts import CommittedUnits
from draftmill.storage.stores.promises import promised
from draftmill.storage.stores.store import open_store, probe, sweep
from draftmill.storage.stores.verbs import Store

SETTLE_S = 1.0
"""Wait before each last look for stray files, in a store that ignores conditional writes."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job; none of these options changes a result."""

    ray_address: str | None = None
    local: bool = False
    quiet: bool = False
    grace_s: float = 30.0
    if_running: IfRunning = "fail"


@dataclass(slots=True)
class Run:
    """The data that the steps of one run share. `loads` says whether workers have to load the model first.

    `ending` tells how the run ends; None for the parts of a sweep or an evaluation. `earlier` is the estimate of its device
    hours from an earlier run of the same job.
    """

    spec: JobSpec
    options: RunOptions
    prepared: Prepared
    store: Store
    plan: Plan
    conditional: bool
    lease: Lease
    stop: StopFlag
    display: Display
    site: Site
    loads: bool = True
    ending: Ending | None = None
    earlier: Estimate | None = None


def run_job(spec: JobSpec, options: RunOptions) -> int:
    """Run or resume a job; returns the exit code. Raises UserError if the spec, an input or the directory is unusable.

    A date in the output path is filled in, from one reading of the clock, unless the spec has a logical date; then the lease
    of the base path is held, too.
    """
    dated = at_date(spec, datetime.now(UTC))
    return when_free(lambda: _in_name(spec, dated, options), options.if_running)


def _in_name(spec: JobSpec, dated: JobSpec, options: RunOptions) -> int:
    stop = StopFlag()
    if not has_date(spec.output.path):
        return _run(dated, options, stop)
    check_places(dated)
    with name_lease(open_store(base_of(spec.output.path), s3=spec.s3.options()), stop.set):
        return _run(dated, options, stop, path=spec.output.path)


def _run(spec: JobSpec, options: RunOptions, stop: StopFlag, *, path: str | None = None) -> int:
    """Run or resume a job whose output path is complete; raises Held if another driver has the run directory.

    `path` is the output path with the date, if it had one; then the lease of the name is held. How the run ends is told to its
    log and to the receivers of `notify`.
    """
    store = open_store(spec.output.path, s3=spec.s3.options())
    code = UNEXPECTED
    with ended(spec, store, ignored=(Held, LeaseLost)) as ending:
        ending.code = code = _work(spec, store, options, stop, ending, path=path)
    return code


def _work(spec: JobSpec, store: Store, options: RunOptions, stop: StopFlag, ending: Ending, *, path: str | None) -> int:
    news = new_files(spec, store, path, keep=True)
    if news is not None:
        print(f"input.since: {news.text}")
        if not news.files:
            print(f"nothing is new in {spec.input.shown}; no run is started")
            return OK
    with make_display(quiet=options.quiet) as display:
        prepared = prepare(spec, store, display, loaders=None if news is None else news.loaders())
    ready = ready_for(spec, prepared.plan)
    if prepared.plan is not None and is_closed(store):
        if store.exists(PRUNED):
            print(f"{store.url} is already finished; its results were deleted by `draftmill prune`")
            return OK
        print(f"{store.url} is already finished")
        s3 = spec.s3.options()
        is_measured = ready is None or measure_run(store, spec, ready, options, s3=s3, lease=run_lease)
        return close(spec, store) if is_measured else INTERRUPTED
    site = site_of(address=options.ray_address, local=options.local)
    site.check(spec)
    conditional = probe(store)
    try:
        with run_lease(store, stop.set) as lease, make_display(quiet=options.quiet) as shown:
            display = LoggedDisplay(shown, ending.log)
            sweep(store)
            if not conditional:
                display.note(f"{store.url} ignores conditional writes: the driver records which file of a unit counts")
            with ExitStack() as stack:
                # Fail on missing resources before writing anything; where there may be nothing to do, plan without Ray.
                if prepared.plan is None and spec.input.dedupe is None:
                    stack.enter_context(site.opening(display, prepared))
                plan = prepared.plan or planned(site, prepared, store, display, epoch=lease.epoch, path=path)
                earlier = None if path is None else earlier_estimate(path, spec, plan.results, plan.tokens)
                run = Run(spec, options, prepared, store, plan, conditional, lease, stop, display, site)
                run.ending, run.earlier = ending, earlier
                finish = decode(run)
                is_measured = finish.how != "done" or ready is None or measured(run, ready)
    except NothingLeft:
        print(f"nothing is new in {spec.input.shown}: finished runs have all its ids as ok; no run is started")
        return OK
    except RayDidNotStart as error:
        raise without_ray(error, store) from error
    if finish.how != "done":
        return broken_off(store, plan, finish, conditional=conditional)
    return close(spec, store) if is_measured else INTERRUPTED


def planned(site: Site, prepared: Prepared, store: Store, display: Display, *, epoch: int, path: str | None) -> Plan:
    """Plan the job; with `input.dedupe` without the rows whose ids finished runs have. NothingLeft if there are no others."""
    spec, s3 = prepared.spec, prepared.spec.s3.options()
    if spec.input.dedupe is None:
        return make_plan(prepared, store, display, epoch=epoch, survey=site.survey(prepared, display))
    path = base_path(spec, path)
    with sifting(open_store(base_of(path), s3=s3), finished_below(path, s3=s3), display, s3=s3) as sift:
        return make_plan(prepared, store, display, epoch=epoch, sift=sift)


def ready_for(spec: JobSpec, plan: Plan | None) -> Ready | None:
    """The spec's metrics, checked before anything is decoded; None if it has none."""
    if not spec.metrics:
        return None
    fields = [f"metrics.{index}" for index in range(len(spec.metrics))]
    kept = spec.kept if plan is None else kept_in(plan)
    return ready_metrics(spec.metrics, fields, spec, kept, s3=spec.s3.options())


def measured(run: Run, ready: Ready) -> bool:
    """Measure the spec's metrics on the run that has just finished; returns whether all is measured."""
    s3 = run.spec.s3.options()
    is_done = measure_units(
        run.store,
        run.spec,
        passes_of(run.store, s3=s3),
        ready,
        site=run.site,
        local=run.options.local,
        display=run.display,
        stop=run.stop,
        grace_s=run.options.grace_s,
        s3=s3,
    )
    if not is_done:
        say_interrupted(run.store, ready, s3=s3)
    return is_done


def without_ray(error: StoreError, store: Store) -> StoreError:
    """The same error, with a hint whether the run can be resumed."""
    planned = load_plan(store) is not None
    hint = "the plan is made: run it again to resume" if planned else "nothing has been written yet"
    return StoreError(f"{error}; {hint}")


def told_full(finish: Finish) -> str:
    """What to do about a full disk."""
    return f"{finish.message}; make room, then run it again to continue"


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


def decode(run: Run) -> Finish:
    """Decode the units that are not done yet, and write the manifest if that completes the plan."""
    with logged(run):
        return _decoded(run)


@contextmanager
def logged(run: Run) -> Iterator[None]:
    """During the block, what is displayed is in the log of the run directory, too."""
    before = run.display
    log = DriverLog() if run.ending is None else run.ending.log
    if run.ending is None:
        run.display = LoggedDisplay(before, log)
    log.attach(run.store, run.lease.epoch, run.spec.name)
    plan = run.plan
    numbers = f"{counted(plan.units, 'unit')}, {counted(plan.rows, 'sample')}"
    facts: dict[str, Any] = {
        "fingerprint": plan.fingerprint,
        "code_version": draftmill.__version__,
        "owner": this_process(),
    }
    log.add("started", numbers, **facts)
    run.display.event("started", units=plan.units, samples=plan.rows, path=run.store.url, **facts)
    try:
        yield
    finally:
        run.display = before
        log.flush()


def _decoded(run: Run) -> Finish:
    done = done_units(run.store, conditional=run.conditional)
    totals = Totals(units=run.plan.units, rows=run.plan.rows, units_before=len(done))
    left = UnitSizes(size for size in run.plan.sizes() if size.unit not in done)
    totals.rows_before = run.plan.rows - left.rows
    if done:
        run.display.note(f"resuming: {len(done):,} of {run.plan.units:,} units are done")
    committed = CommittedUnits()
    finish = Finish("done")
    if left and not run.plan.is_readable:
        run.display.note("no row can be decoded: the model is not loaded, and the results say why")
        run = replace(run, site=ReadingSite(run.prepared.info, run.prepared.tokenizer), loads=False)
    if left:
        with run.site.opened(run.display), run.stop.on_signals():
            finish, committed = _drive(run, left, totals)
    if finish.how == "done":
        _write_manifest(run, committed, (name for unit, name in done.items() if unit not in committed))
    return finish


def _drive(run: Run, left: UnitSizes, totals: Totals) -> tuple[Finish, CommittedUnits]:
    crew = crew_of(run, len(left))
    for note in run.site.lacking(run.spec, crew):
        run.display.note(note)
    log = AttemptsLog(run.store, run.lease.epoch)
    if run.loads:
        size = size_text(weight_bytes(run.prepared.folder))
        run.display.note(f"loading the model on {counted(crew.count, 'worker')}: {size}")
    job = make_job(run.spec, run.plan, conditional=run.conditional, inputs=run.prepared.inputs)
    pool = run.site.pool(job, crew)
    demand = run.site.demand(run.spec)
    limits = limits_of(run.spec)
    if demand is not None:
        limits = replace(limits, idle_s=IDLE_S)
    totals.devices = DeviceTime(price_of=lambda worker: run.spec.shapes[pool.kind_of(worker)].price_per_hour)
    driver = Driver(
        scheduler=Scheduler(left, workers=crew.count, limits=limits, pass_=run.plan.pass_),
        pool=pool,
        display=run.display,
        totals=totals,
        log=log,
        stop=run.stop,
        grace_s=run.options.grace_s,
        record=lambda unit: recorded(run, unit),
        hopeless=hopelessness(run),
        room=lambda: room_for(run, pool, len(left)),
        need=demand.need if demand else lambda units: None,
        watchers=Watchers(watchers_of(run), note=run.display.note),
    )
    is_over = False
    try:
        finish = driver.run()
        is_over = finish.how in {"done", "hopeless"}
    finally:
        if demand is not None:
            demand.close()
        totals.stop()
        log.flush(totals)
        driver.watchers.over(totals, driver.scheduler)
        if is_over:
            run.site.retire(pool)
        else:
            pool.close()
    return finish, driver.committed


def watchers_of(run: Run) -> list[Watcher]:
    """What looks on while this run's units are decoded: estimate, notices, and metrics where there is a Ray to export them."""
    watchers: list[Watcher] = [EstimateWatcher(run.store, run.plan.tokens, earlier=run.earlier)]
    if run.ending is not None and run.spec.notify:
        watchers.append(run.ending.stalls())
    if not run.options.local and is_connected():
        from draftmill.jobs.watching.metrics import MetricsWatcher

        watchers.append(MetricsWatcher(run.spec.name, run.spec.decoder.kind))
    return watchers


def crew_of(run: Run, units: int) -> Crew:
    """The workers that fit now, with no more threads than the model can use."""
    found = run.site.crew(run.spec, units=units)
    size = run.prepared.info.num_parameters
    return replace(found, seats=tuple(fitting_threads(seat, size) for seat in found.seats))


def room_for(run: Run, pool: WorkerPool, units: int) -> int:
    """How many workers fit now, which the pool is told, too; 0 if the cluster has lost too many resources for even one."""
    try:
        found = crew_of(run, units)
    except UserError:
        return 0
    pool.resize(found)
    return found.count


def hopelessness(run: Run) -> Callable[[int], bool]:
    """Returns a function that tells whether this session's failed samples, with earlier sessions' ones, are too many."""
    try:
        before = read_sessions(run.store).committed.failed
    except StoreError:  # the log is best effort
        before = 0
    is_first = run.plan.pass_ == 1  # a later pass consists of samples that failed before
    return lambda failed: is_first and hopeless(before + failed, run.plan.rows, run.spec.errors)


IDLE_S = 20.0
"""Seconds after which a worker for which no unit is left ends, where an autoscaler can take its node away."""


def limits_of(spec: JobSpec) -> Limits:
    """The scheduler's limits, with the spec's settings."""
    stall_s, start_s = (max(getattr(shape, key) for shape in spec.shapes) for key in ("stall_s", "start_s"))
    return Limits(attempts=spec.errors.attempts, lease_s=stall_s, start_s=start_s)


def recorded(run: Run, unit: CommittedUnit) -> CommittedUnit:
    """Record a unit that a worker reports as committed; StoreError if the worker wrote to another machine's disk."""
    if not run.conditional:
        return record_commit(run.store, unit, epoch=run.lease.epoch)
    if "://" not in run.store.url and not run.store.exists(unit.object):
        raise StoreError(
            f"a worker wrote {unit.object}, but not here; on several machines, output.path must be a shared folder or s3://"
        )
    return unit


def _write_manifest(run: Run, committed: CommittedUnits, earlier: Iterable[str]) -> None:
    """Write the manifest: this session's units come from the receipts, earlier ones are read from the store."""
    units = committed.facts
    for _, facts in promised(run.store, earlier, lambda name: committed_facts(run, name), reads=True):
        units.add(facts.result())
    if not run.conditional:
        _sweep(run, units)
    write_manifest(
        run.store,
        units,
        fingerprint=run.plan.fingerprint,
        units=run.plan.units,
        rows=run.plan.rows,
        lease=run.lease,
    )


def _sweep(run: Run, units: Iterable[CommittedUnit]) -> None:
    """Delete the files of duplicate attempts. The names that count are recorded, and all workers have ended.

    The last write of an ended worker may still be in progress in the store: repeat until no more files appear.
    """
    counting = {unit.object.removeprefix("data/") for unit in units}
    _delete_others(run, counting)
    time.sleep(SETTLE_S)
    while _delete_others(run, counting):
        time.sleep(SETTLE_S)


def _delete_others(run: Run, counting: set[str]) -> int:
    """Delete unit files and traces with other names; returns how many. A trace has the same name as its data file."""
    others = [
        stat.name
        for folder in ("data/", "traces/")
        for stat in run.store.list(folder)
        if stat.name.removeprefix(folder) not in counting
    ]
    for name in others:
        run.lease.check()  # without the lease delete nothing: the files may belong to our successor
        run.store.delete(name)
    return len(others)


def committed_facts(run: Run, name: str) -> CommittedUnit:
    """The facts of a unit that an earlier session committed, from its data file or its record."""
    if run.conditional:
        return read_unit(run.store, name, expected={"fingerprint": run.plan.fingerprint})
    return read_record(run.store, name)


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
    estimate, done = read_estimate(store), spec.task.done
    print("\n".join(table_lines(spec.name, store.url, manifest, results, sessions, done=done, estimate=estimate)))


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
