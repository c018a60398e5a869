"""A session of a run: workers decode the units that are not done yet, and the manifest is written when all are.

done set -> workers -> driver and scheduler -> units committed -> manifest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import draftmill
from draftmill.actors.job import Allocation
from draftmill.jobs.driving.allocation import fitting_threads
from draftmill.jobs.driving.attempts import AttemptsLog, read_sessions
from draftmill.jobs.driving.backend import Backend, ReadingBackend, WorkerPool
from draftmill.jobs.driving.device_time import DeviceTime
from draftmill.jobs.driving.driver import Driver, StopFlag
from draftmill.jobs.driving.driver_log import DriverLog, LoggedDisplay
from draftmill.jobs.driving.progress import Display
from draftmill.jobs.driving.session import is_connected
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.driving.watchers import Watcher, Watchers
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.prepare import Prepared, weight_bytes
from draftmill.jobs.plan.worker_job import make_job
from draftmill.jobs.recurring.base_lease import IfRunning
from draftmill.jobs.running.manifest import write_run_manifest
from draftmill.jobs.schedule.events import Finish
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.jobs.schedule.unit_sizes import UnitSizes
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.jobs.spec.thresholds import hopeless
from draftmill.jobs.watching.ending import Ending
from draftmill.jobs.watching.estimate import Estimate, EstimateWatcher
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.commit import done_units, record_commit
from draftmill.storage.runs.lease import Lease, this_process
from draftmill.storage.runs.unit_facts import CommittedUnit, CommittedUnits
from draftmill.storage.stores.interface import Store


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
    backend: Backend
    loads: bool = True
    ending: Ending | None = None
    earlier: Estimate | None = None


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
        run = replace(run, backend=ReadingBackend(run.prepared.info, run.prepared.tokenizer), loads=False)
    if left:
        with run.backend.opened(run.display), run.stop.on_signals():
            finish, committed = _drive(run, left, totals)
    if finish.how == "done":
        write_run_manifest(run, committed, (name for unit, name in done.items() if unit not in committed))
    return finish


def _drive(run: Run, left: UnitSizes, totals: Totals) -> tuple[Finish, CommittedUnits]:
    allocation = allocate_workers(run, len(left))
    for note in run.backend.lacking(run.spec, allocation):
        run.display.note(note)
    log = AttemptsLog(run.store, run.lease.epoch)
    if run.loads:
        size = size_text(weight_bytes(run.prepared.folder))
        run.display.note(f"loading the model on {counted(allocation.count, 'worker')}: {size}")
    job = make_job(run.spec, run.plan, conditional=run.conditional, inputs=run.prepared.inputs)
    pool = run.backend.pool(job, allocation)
    demand = run.backend.demand(run.spec)
    limits = limits_of(run.spec)
    if demand is not None:
        limits = replace(limits, idle_s=IDLE_S)
    totals.devices = DeviceTime(price_of=lambda worker: run.spec.shapes[pool.kind_of(worker)].price_per_hour)
    driver = Driver(
        scheduler=Scheduler(left, workers=allocation.count, limits=limits, pass_=run.plan.pass_),
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
            run.backend.retire(pool)
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


def allocate_workers(run: Run, units: int) -> Allocation:
    """The workers that fit now, with no more threads than the model can use."""
    found = run.backend.allocate(run.spec, units=units)
    size = run.prepared.info.num_parameters
    return replace(found, kinds=tuple(fitting_threads(resources, size) for resources in found.kinds))


def room_for(run: Run, pool: WorkerPool, units: int) -> int:
    """How many workers fit now, which the pool is told, too; 0 if the cluster has lost too many resources for even one."""
    try:
        found = allocate_workers(run, units)
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
