"""A session of a run: workers decode the units that are not done yet, and the manifest is written when all are."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from draftmill.actors.job import Allocation
from draftmill.jobs.drive.allocation import fitting_threads
from draftmill.jobs.drive.backend import Backend
from draftmill.jobs.drive.driver import Driver, StopFlag, Watcher, WorkerPool, raise_unfinished
from draftmill.jobs.drive.leases import IfRunning
from draftmill.jobs.drive.metrics import MetricsWatcher
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import is_connected
from draftmill.jobs.drive.run_log import INTERRUPTED_S, logged_units, read_sessions
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.exit_codes import failed_text, hopeless
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.resolve import Resolved, limits_of, make_job, weight_bytes
from draftmill.jobs.results.run_input import source_of
from draftmill.jobs.results.summary import way_shares
from draftmill.jobs.schedule.events import Finish
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSizes
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.commit import done_units, read_unit, write_manifest
from draftmill.storage.runs.lease import Lease, this_process
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import Store, is_local
from draftmill.version import __version__


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job; none of these options changes a result."""

    ray_address: str | None = None
    local: bool = False
    grace_s: float = 30.0
    if_running: IfRunning = "fail"

    def __post_init__(self) -> None:
        if self.local and self.ray_address is not None:
            raise UserError("--local runs without Ray; allowed: only one of the two options", field="--ray-address")


@dataclass(frozen=True, slots=True)
class Run:
    """What one session of a run works with. Its display writes the run's log, too; its watchers look on while it decodes.

    `loads` says whether workers have to load the model first.
    """

    resolved: Resolved
    plan: Plan
    options: RunOptions
    lease: Lease
    stop: StopFlag
    display: Display
    backend: Backend
    loads: bool = True
    watchers: Sequence[Watcher] = ()


def decode(run: Run) -> None:
    """Decode the units that are not done yet, and write the manifest; raises what `raise_unfinished` does."""
    plan, display = run.plan, run.display
    display.log.attach(plan.store, run.lease.epoch, run.resolved.spec.name)
    display.event(
        "started",
        units=plan.units,
        samples=plan.rows,
        path=plan.store.url,
        fingerprint=plan.fingerprint,
        code_version=__version__,
        owner=this_process(),
    )
    try:
        done = done_units(plan.store)
        left = UnitSizes(size for size in plan.sizes() if size.unit not in done)
        if done:
            display.note(f"resuming: {len(done):,} of {counted(plan.units, 'unit')} done")
        decoded = _decode_units(run, left) if left else UnitFacts()
        _write_manifest(run, decoded, done)
    finally:
        display.log.write_out()


def _decode_units(run: Run, left: UnitSizes) -> UnitFacts:
    resolved, plan, display, backend, loads = run.resolved, run.plan, run.display, run.backend, run.loads
    spec, log, files, failed_before = resolved.spec, display.log, FilesHere(plan.store), 0
    with suppress(StoreError):  # the log is best effort
        failed_before = read_sessions(plan.store).committed.failed
    totals = Totals(
        units=plan.units,
        rows=plan.rows,
        units_before=plan.units - len(left),
        rows_before=plan.rows - left.rows,
        counts_open=getattr(getattr(resolved.recipe.task, "mask", None), "kind", None) != "marker",
        planned_failures=max(0, sum(plan.totals.errors.values()) - failed_before),
    )
    with backend.opened(display), run.stop.on_signals():
        allocation = allocate_workers(backend, resolved, len(left))
        for note in backend.lacking(spec, allocation):
            display.note(note)
        if loads:
            size = size_text(weight_bytes(resolved.folder))
            display.note(f"loading the model on {counted(allocation.count, 'worker')}: {size}")
        watchers = list(run.watchers)
        if not run.options.local and is_connected():  # there is a Ray to export the metrics
            watchers.append(MetricsWatcher(spec.name, spec.decoder.kind))
        limits, pool, demand = limits_of(spec), backend.pool(make_job(resolved, plan), allocation), backend.demand(spec)
        if demand is not None:
            limits = replace(limits, idle_s=20.0)  # the autoscaler can then take the node of an idle worker away
        driver = Driver(
            scheduler=Scheduler(left, workers=allocation.count, limits=limits, pass_=plan.pass_),
            pool=pool,
            display=display,
            totals=totals,
            stop=run.stop,
            grace_s=run.options.grace_s,
            look=files.look,
            hopeless=lambda failed: plan.pass_ == 1 and hopeless(failed_before + failed, plan.rows, spec.errors),
            room=lambda: _room_for(pool, backend, resolved, len(left)),
            need=demand.need if demand else lambda units: None,
            watchers=watchers,
        )
        is_over = False
        try:
            finish = driver.run()
            if finish.how == "done":
                files.wait()
            is_over = finish.how in {"done", "hopeless"}
            if finish.how == "hopeless":
                failed = failed_before + totals.committed.failed
                finish = Finish("hopeless", failed_text(failed, plan.rows, spec.errors))
        finally:
            if demand is not None:
                demand.need(0)
            totals.stop()
            if run.stop.reason is not None:
                log.patience_s = min(log.patience_s, INTERRUPTED_S)
            log.write_out(totals)
            driver.watch(lambda watcher: watcher.over(totals, driver.scheduler))
            backend.end(pool, is_over=is_over)
    raise_unfinished(finish, run.stop, lambda: f"{len(done_units(plan.store)):,} of {counted(plan.units, 'unit')} done")
    return driver.committed


def allocate_workers(backend: Backend, resolved: Resolved, units: int) -> Allocation:
    """The workers that fit now, with no more threads than the model can use."""
    allocation, size = backend.allocate(resolved.spec, units=units), resolved.info.num_parameters
    return replace(allocation, kinds=tuple(fitting_threads(resources, size) for resources in allocation.kinds))


def _room_for(pool: WorkerPool, backend: Backend, resolved: Resolved, units: int) -> int:
    """How many workers fit now, which the pool needs to know; 0 if the cluster has lost too many resources for even one."""
    with suppress(UserError):
        allocation = allocate_workers(backend, resolved, units)
        pool.resize(allocation)
        return allocation.count
    return 0


APPEARS_S = 10.0
"""Seconds in which a file of another machine appears in a shared folder, at most."""


class FilesHere:
    """Looks for the first file of each worker, on a thread: a worker of another machine may write to a disk of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looks: dict[str, threading.Thread] = {}
        self._missing: list[str] = []

    def look(self, worker: str, unit: CommittedUnit) -> None:
        """Look for a unit's file, if it is the worker's first; StoreError if another one was not found."""
        if is_local(self._store.url) and worker not in self._looks:
            self._looks[worker] = threading.Thread(target=self._look, args=(unit.object,), name="look", daemon=True)
            self._looks[worker].start()
        self._check()

    def wait(self) -> None:
        """Wait for the last looks; StoreError if a file was not found."""
        for thread in self._looks.values():
            thread.join()
        self._check()

    def _check(self) -> None:
        for name in self._missing:
            raise StoreError(
                f"a worker wrote {name}, but not here; on several machines, output.path must be a shared folder or s3://"
            )

    def _look(self, name: str) -> None:
        until_s = time.monotonic() + APPEARS_S
        while time.monotonic() < until_s:
            with suppress(StoreError):
                if self._store.exists(name):
                    return
            time.sleep(APPEARS_S / 50)
        self._missing.append(name)


def _write_manifest(run: Run, units: UnitFacts, earlier: Collection[int]) -> None:
    """Write the manifest: this session's units come from the receipts, earlier ones from the store.

    A disk keeps no metadata: there the logs have the facts of files that are the same, and only other files are read.
    """
    plan, store = run.plan, run.plan.store
    if is_local(store.url):
        for unit in logged_units(store) if earlier else ():
            if unit.unit in earlier and unit.unit not in units.listed:
                stat = store.stat(unit_name(unit.unit))
                if stat is not None and (stat.etag, stat.size) == (unit.etag, unit.bytes):
                    with suppress(ValueError, TypeError, KeyError, OverflowError):  # a damaged line
                        units.add(unit)
    names = (unit_name(unit) for unit in earlier if unit not in units.listed)
    for _, facts in parallel_map(names, lambda name: committed_facts(plan, name)):
        units.add(facts.result())
    source = source_of(run.resolved.spec, plan.files, store) if plan.pass_ == 1 else None
    ways = None
    if run.resolved.spec.decoder.kind == "fastest":
        with suppress(StoreError):  # the log is best effort
            ways = way_shares(read_sessions(store))
    write_manifest(
        store,
        units,
        fingerprint=plan.fingerprint,
        units=plan.units,
        rows=plan.rows,
        lease=run.lease,
        source=source,
        ways=ways,
    )


def committed_facts(plan: Plan, name: str) -> CommittedUnit:
    """The facts of a unit that an earlier session committed."""
    return read_unit(plan.store, name, expected={"fingerprint": plan.fingerprint})
