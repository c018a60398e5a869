"""The fake pool of the simulation and its workers, whose units are committed by the real committer.

What a worker does, and when, is drawn by the world (world.py).
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftmill.actors.job import Allocation
from draftmill.actors.messages import Effort, Failure, PoolEvent, Receipt, Tally, TurnReport, WorkerReported, WorkUnit
from draftmill.jobs.drive.allocation import NodeRoom, allocate
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.commit import commit_unit
from draftmill.storage.runs.unit_facts import CommittedUnit
from tests.simulation.disk import Crash, Handle, Job, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

FINGERPRINT = "f"


class Table:
    """Result rows, (id, status, reason), as much of a table as the committer looks at."""

    def __init__(self, rows: list[tuple[str, str, str]]) -> None:
        self.rows = rows

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Any:
        index = ("id", "status", "reason").index(name)
        return SimpleNamespace(to_pylist=lambda: [row[index] for row in self.rows])


def unit_file(table: Any, metadata: dict[str, str]) -> bytes:
    """Stands for the committer's Parquet, of which tests/storage/runs/test_commit.py has the rest."""
    return json.dumps({"meta": metadata, "rows": table.rows}).encode()


@dataclass(slots=True, eq=False)
class Worker:
    """A worker: the units in its hands, and the reports that are on their way."""

    process: Process
    store: Handle
    units: list[WorkUnit] = field(default_factory=list)
    mail: list[PoolEvent] = field(default_factory=list)
    up: bool = False
    silent: bool = False
    """Stopped: says nothing until it is killed, and may write afterwards."""
    leaving: bool = False
    """Its node was told to go, and may be gone at any moment."""

    @property
    def name(self) -> str:
        return self.process.name


class SimSite:
    """Where the driver takes its workers from: a cluster of as many CPUs as the world has now."""

    def __init__(self, world: World) -> None:
        self.world = world

    def opened(self, display: Any) -> AbstractContextManager[None]:
        """There is nothing to start."""
        return nullcontext()

    def allocate(self, spec: Any, *, units: int) -> Allocation:
        """See draftmill.jobs.drive.backend.Backend."""
        return allocate(spec.shapes, [NodeRoom(self.world.cpus(), 0)], units=units, device="cpu")

    def lacking(self, spec: Any, found: Allocation) -> list[str]:
        """See draftmill.jobs.drive.backend.Backend."""
        return []

    def demand(self, spec: Any) -> None:
        """See draftmill.jobs.drive.backend.Backend."""

    def pool(self, job: tuple[World, Process], allocation: Allocation) -> SimPool:
        """See draftmill.jobs.drive.backend.Backend; the job is who hires, as `make_job` is faked."""
        return SimPool(job)

    def end(self, pool: SimPool, *, is_over: bool) -> None:
        """See draftmill.jobs.drive.backend.Backend."""
        pool.close()


class SimPool:
    """What the driver takes for its pool; `world` decides what its workers do."""

    def __init__(self, hired_by: tuple[World, Process]) -> None:
        self.world, self.driver = hired_by
        self.workers: dict[str, Worker] = {}
        self.world.pools.append(self)

    def resize(self, allocation: Allocation) -> None:
        pass

    def start(self, name: str) -> None:
        process = Process(name, is_driver=False, epoch=self.driver.epoch)
        self.workers[name] = Worker(process, Handle(self.world, process))

    def assign(self, name: str, unit: WorkUnit) -> None:
        if name in self.workers:
            self.workers[name].units.append(unit)

    def revoke(self, name: str, lease: int) -> None:
        worker = self.workers.get(name)
        if worker is not None and not self.world.chance(0.3):  # else it is being written already
            worker.units = [unit for unit in worker.units if unit.lease != lease]

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.world.zombies.append(worker)

    def close(self) -> None:
        for name in list(self.workers):
            self.kill(name)
        if self in self.world.pools:
            self.world.pools.remove(self)

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        if not self.driver.alive:
            raise Crash(self.driver.name)
        return self.world.turn(self)


def reported(worker: Worker, *items: Receipt | Failure, spent: tuple[int, ...] = ()) -> WorkerReported:
    """A worker's report."""
    return WorkerReported(worker.name, TurnReport(items, Effort(), Tally(), spent))


def result_of(world: World, worker: Worker, unit: WorkUnit) -> Receipt | Failure:
    """The unit's rows decoded, and committed unless it is a probe; poison kills the worker (Crash), or raises."""
    quarantined = {row: verdict.kind for verdict in unit.verdicts for row in range(verdict.start, verdict.stop)}
    for row in range(unit.start, unit.stop):
        kind = None if row in quarantined else world.job.poison.get((unit.unit, row))
        if kind == "kill":
            worker.process.die()
        if kind == "raise":
            return Failure(unit.lease, unit.unit, worker.name, "TASK", "boom", "decode", "it broke")
    if world.misfortune(0.01, f"{worker.name} raises"):
        return Failure(unit.lease, unit.unit, worker.name, "TASK", "odd", "decode", "an exception of no row's")
    try:
        committed = None if unit.probe else commit(worker.store, world.job, unit, quarantined)
    except StoreError as error:
        return Failure(unit.lease, unit.unit, worker.name, "INFRA", "store", "store", str(error))
    return Receipt(unit.lease, unit.unit, worker.name, "node", committed, Tally(rows=unit.rows))


def commit(store: Handle, job: Job, unit: WorkUnit, quarantined: dict[int, str]) -> CommittedUnit:
    """Commit a unit's rows, of which the quarantined ones are failed."""
    names = enumerate(job.ids(unit.unit))
    rows = [(name, "failed" if row in quarantined else "ok", quarantined.get(row, "")) for row, name in names]
    return commit_unit(
        store,
        unit=unit.unit,
        table=Table(rows),
        fingerprint=FINGERPRINT,
        code_version="0",
        attempt=unit.attempt,
    )
