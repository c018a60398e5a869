"""The scheduler's records of units, leases, workers and bisections, kept consistent with each other. No policy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from draftmill.actors.messages import MOST_UNITS, QuarantinedRows, WorkerReported, WorkUnit
from draftmill.jobs.schedule.units import UnitSize, UnitSizes, WaitingUnits
from draftmill.storage.runs.done_units import DoneUnits

STRIKES = 2
"""Failures of a row on its own before it is quarantined."""

MAX_ROUNDS = 2
"""Bisections into the same unit before all of its rows are quarantined together."""

Range = tuple[int, int]


class FailureCause(NamedTuple):
    """Why a range failed; becomes the error of the quarantined rows."""

    kind: str
    stage: str
    message: str


@dataclass(slots=True)
class Bisection:
    """The search for the rows of a unit that make it fail or kill its workers.

    A range that failed while it ran alone is halved, and a probe decodes each half again. A single row is quarantined only after
    it failed alone twice, since a machine may also die for unrelated reasons. `waiting` holds ranges that still need a probe,
    `asked` those that a probe is decoding; they never overlap.
    """

    waiting: list[Range] = field(default_factory=list)
    asked: list[Range] = field(default_factory=list)
    strikes: dict[int, int] = field(default_factory=dict)

    @property
    def closed(self) -> bool:
        """Whether no range needs a probe or is being probed."""
        return not self.waiting and not self.asked

    def suspect(self, rows: Range, cause: FailureCause) -> QuarantinedRows | None:
        """Note that `rows` failed alone. Returns a verdict if that settles it; otherwise queues further probes."""
        start, stop = rows
        if stop - start > 1:
            middle = (start + stop) // 2
            self.waiting += [(start, middle), (middle, stop)]
            return None
        self.strikes[start] = self.strikes.get(start, 0) + 1
        if self.strikes[start] >= STRIKES:
            return QuarantinedRows(*rows, *cause)
        self.waiting.append(rows)
        return None

    def ask(self) -> Range:
        """Take the next range to probe: the lowest rows first, so that the order is deterministic."""
        rows = min(self.waiting)
        self.waiting.remove(rows)
        self.asked.append(rows)
        return rows

    def requeue(self, rows: Range) -> None:
        """Queue `rows` again: their probe gave no result."""
        self.asked.remove(rows)
        self.waiting.append(rows)


AHEAD = 1
"""Leases per worker on units whose samples still wait for slots: the reserve from which it refills slots."""

KNOWN_S = 5.0
"""Seconds of decoding after which a worker's speed counts as known."""

COPIES = 2
"""Workers that may hold the same unit at the end of a job, at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many failures, and how much time without progress, the scheduler tolerates.

    `attempts`: TASK failures of a unit before its rows are probed. `deaths`: workers that die with a unit before it runs
    alone. `devices`: devices that a unit's workers may lose before each further loss counts as such a death.
    `infra`: INFRA failures of a unit before the job gives up, or `full` if the disk is full. `starts`: failed starts in a
    row, per worker wanted, and `fruitless`: worker deaths in a row without a success (at least three per worker
    wanted), before the job gives up. A unit rests `rest_s` after its first INFRA failure, twice as long after each further
    one, at most `max_rest_s`. A worker is killed after `lease_s` without progress, or if it is not up after `start_s`. A worker
    that no unit is left for ends after `idle_s`, so that its machine can go; infinite where machines do not come and go.
    """

    attempts: int = 3
    deaths: int = 2
    devices: int = 2
    infra: int = 8
    full: int = 3
    starts: int = 2
    fruitless: int = 30
    lease_s: float = 600.0
    start_s: float = 1800.0
    rest_s: float = 1.0
    max_rest_s: float = 60.0
    idle_s: float = math.inf


@dataclass(slots=True)
class Unit:
    """The history of a unit that is not done; created when it is first leased."""

    size: UnitSize
    leases: list[int] = field(default_factory=list)
    task_failures: int = 0
    infra_failures: int = 0
    deaths: int = 0
    lost_devices: int = 0
    alone: bool = False
    rounds: int = 0
    resting_until_s: float | None = None
    bisection: Bisection | None = None
    verdicts: tuple[QuarantinedRows, ...] = ()

    @property
    def suspect(self) -> bool:
        """Whether its rows may be to blame for a failure."""
        return self.alone or self.task_failures + self.deaths > 0

    @property
    def attempt(self) -> int:
        """The number of the next attempt, from 1."""
        return 1 + self.task_failures + self.infra_failures + self.deaths


@dataclass(slots=True)
class UnitLease:
    """One assignment. `rows` is the probed range, None for the unit as a whole."""

    number: int
    unit: int
    worker: str
    rows: Range | None
    expires_s: float


@dataclass(slots=True)
class Worker:
    """A worker that is starting or up, and its leases, oldest first; few samples of the `spent` leases still wait for a slot.

    A `leaving` worker gets nothing more; if it dies, its leases count as lost, not as failed. At `leave_by_s` it is ended.
    `idle_since_s` is when it was first seen without a lease. It has `generated` so many tokens in `busy_s`, the last `since`
    of them since it finished a unit, and the last ones at `moved_s`.
    """

    name: str
    up: bool = False
    leaving: bool = False
    leave_by_s: float = math.inf
    hired_s: float = 0.0
    idle_since_s: float | None = None
    leases: list[int] = field(default_factory=list)
    spent: set[int] = field(default_factory=set)
    heard_s: float = 0.0
    moved_s: float = 0.0
    generated: int = 0
    busy_s: float = 0.0
    since: int = 0

    @property
    def speed(self) -> float:
        """Tokens that it generates per second while it holds units; 0 if it is not known yet."""
        return self.generated / self.busy_s if self.busy_s >= KNOWN_S else 0.0

    @property
    def has_room(self) -> bool:
        """Whether it can take another unit: most samples of those it holds have their slots."""
        return len(self.leases) < MOST_UNITS and len(self.leases) - len(self.spent) < AHEAD

    def runs(self, lease: int) -> bool:
        """Whether samples of the lease are being decoded, as far as the scheduler knows."""
        return lease == self.leases[0] or lease in self.spent


class SchedulerState:
    """Every unit is in exactly one state: waiting, delicate, leased, resting, or done.

    `delicate` holds the units to lease that must run alone on their worker. `touched` has the history of every unit that
    was leased and is not done.
    """

    def __init__(self, units: UnitSizes | Iterable[UnitSize], pass_: int, workers: int) -> None:
        self.pass_ = pass_
        self.sizes = units if isinstance(units, UnitSizes) else UnitSizes(units)
        self.touched: dict[int, Unit] = {}
        self.done = DoneUnits()
        self.delicate: set[int] = set()
        self.resting: set[int] = set()
        self.leases: dict[int, UnitLease] = {}
        self.workers: dict[str, Worker] = {}
        self.waiting = WaitingUnits(self.sizes, workers)
        self._num_leases = 0
        self._num_workers = 0
        self._finished_tokens = self._finished_generated = 0

    def hire(self, now_s: float) -> Worker:
        """Enter a starting worker, under a name that was never used."""
        worker = Worker(f"w{self._num_workers}", hired_s=now_s)
        self._num_workers += 1
        self.workers[worker.name] = worker
        return worker

    def lease(self, worker: Worker, number: int, rows: Range | None, expires_s: float, now_s: float = 0.0) -> WorkUnit:
        """Enter a lease on the unit (or, for a probe, on its `rows`); returns the message for the worker."""
        unit = self.touched.setdefault(number, Unit(self.sizes[number]))
        lease = UnitLease(self._num_leases, number, worker.name, rows, expires_s)
        self._num_leases += 1
        self.leases[lease.number] = lease
        if not worker.leases:
            worker.heard_s, worker.moved_s, worker.since = now_s, now_s, 0
        worker.leases.append(lease.number)
        unit.leases.append(lease.number)
        start, stop = rows or (0, unit.size.rows)
        return WorkUnit(
            lease=lease.number,
            unit=number,
            rows=unit.size.rows,
            tokens=unit.size.tokens,
            attempt=unit.attempt,
            pass_=self.pass_,
            start=start,
            stop=stop,
            probe=rows is not None,
            verdicts=unit.verdicts,
        )

    def release(self, number: int) -> UnitLease:
        """Remove a lease; the caller decides what happens to its unit."""
        lease = self.leases.pop(number)
        self.touched[lease.unit].leases.remove(number)
        if lease.worker in self.workers:
            self.workers[lease.worker].leases.remove(number)
            self.workers[lease.worker].spent.discard(number)
        return lease

    def note_report(self, event: WorkerReported, now_s: float, lease_s: float) -> bool:
        """Enter what a worker has done, which renews its leases; returns whether it may now have room for other units.

        A report without progress renews none. Ignores `spent` leases that the worker no longer holds.
        """
        worker, report = self.workers.get(event.worker), event.report
        tokens = report.effort.engine.committed
        if worker is None:
            return False
        for number in worker.leases if report.moved else ():
            self.leases[number].expires_s = now_s + lease_s
        if worker.leases:
            worker.generated += tokens
            worker.since += tokens
            worker.busy_s += now_s - worker.heard_s
            worker.heard_s = now_s
            worker.moved_s = now_s if tokens else worker.moved_s
        before, worker.spent = worker.spent, set(report.spent).intersection(worker.leases)
        return worker.spent != before

    def tokens_left(self, worker: Worker) -> float:
        """About how many tokens of canvases a worker still has to decode, as many for a generated one as in what is finished."""
        held = sum(self.touched[self.leases[number].unit].size.tokens for number in worker.leases)
        scale = self._finished_tokens / self._finished_generated if self._finished_generated else 1.0
        return max(0.0, held - scale * worker.since)

    def dismiss(self, name: str) -> tuple[Worker, list[UnitLease]] | None:
        """Remove a worker and its leases, and return them; None if the worker is unknown."""
        worker = self.workers.pop(name, None)
        return (worker, [self.release(number) for number in worker.leases]) if worker else None

    @property
    def num_staying(self) -> int:
        """Number of workers that are up or starting, and stay."""
        return sum(not worker.leaving for worker in self.workers.values())

    def states(self) -> dict[str, int]:
        """How many units are in each state: done, held by workers, resting after a failure, suspected, and waiting."""
        held = {lease.unit for lease in self.leases.values()}
        open_ = [(number, unit) for number, unit in self.touched.items() if number not in held]
        resting = sum(unit.resting_until_s is not None for _, unit in open_)
        suspected = sum(unit.resting_until_s is None and unit.alone for _, unit in open_)
        left = len(self.sizes) - len(self.done) - len(held) - resting - suspected
        return {"done": len(self.done), "held": len(held), "resting": resting, "suspected": suspected, "waiting": left}

    def overdue(self, now_s: float, limits: Limits) -> list[tuple[str, str]]:
        """The workers that hang, while decoding or while starting: (name, reason)."""
        stuck = {lease.worker for lease in self.leases.values() if lease.expires_s < now_s}
        waiting = {w.name for w in self.workers.values() if not w.up and w.hired_s + limits.start_s < now_s}
        return [(name, f"no progress for {limits.lease_s:.0f} s") for name in sorted(stuck)] + [
            (name, f"not up after {limits.start_s:.0f} s") for name in sorted(waiting)
        ]

    def idle_workers(self, now_s: float, idle_s: float) -> list[str]:
        """The workers that have been without a lease for `idle_s`, newest first; notes since when others are."""
        for worker in self.workers.values():
            if worker.leaving or worker.leases:
                worker.idle_since_s = None
            elif worker.idle_since_s is None:
                worker.idle_since_s = now_s
        idle = [w for w in self.workers.values() if w.idle_since_s is not None and now_s - w.idle_since_s >= idle_s]
        return [w.name for w in sorted(idle, key=lambda w: (not w.up, w.hired_s, w.name), reverse=True)]

    def staying(self) -> list[Worker]:
        """The workers that are up and stay."""
        return [worker for worker in self.workers.values() if worker.up and not worker.leaving]

    def hands(self, *, busy: bool = True) -> list[Worker]:
        """The workers that may get units: up, staying, and without a unit that runs alone; fewest leases first.

        Without `busy`, only those that have room now.
        """
        free = [worker for worker in self.staying() if (busy or worker.has_room) and not self.holds_alone(worker)]
        return sorted(free, key=lambda worker: (len(worker.leases), worker.name))

    def slow(self) -> list[UnitLease]:
        """The leases whose units may be copied: first those of leaving workers, then units hardly begun, then the oldest.

        Excludes units that have failed: while one copy runs, failures of the other have no effect, so it might never end.
        """

        def order(lease: UnitLease) -> tuple[bool, bool, int]:
            holder = self.workers[lease.worker]
            return not holder.leaving, holder.leases[0] == lease.number, lease.number

        return sorted((x for x in self.leases.values() if not self.touched[x.unit].suspect), key=order)

    def enqueue(self, number: int) -> None:
        """Queue a unit, if it has work that no lease covers."""
        unit = self.touched[number]
        if unit.bisection is not None and not unit.bisection.waiting:
            return
        if unit.alone:
            self.delicate.add(number)
        else:
            self.waiting.put(number)

    def wake(self, now_s: float) -> bool:
        """Queue the units whose rest is over; returns whether there are any."""
        rested = [number for number in sorted(self.resting) if (self.touched[number].resting_until_s or 0.0) <= now_s]
        for number in rested:
            self.resting.discard(number)
            self.touched[number].resting_until_s = None
            self.enqueue(number)
        return bool(rested)

    def finish(self, number: int) -> list[UnitLease]:
        """Enter a unit as done, whatever its state, and drop its history; returns the leases that it still had."""
        self.done.add(number)
        self.waiting.discard(number)
        self.delicate.discard(number)
        self.resting.discard(number)
        unit = self.touched.get(number)
        if unit is None:
            return []
        for lease in unit.leases[:1]:
            worker = self.workers.get(self.leases[lease].worker)
            if worker is not None and worker.since:
                self._finished_tokens += unit.size.tokens
                self._finished_generated += worker.since
                worker.since = 0
        leases = [self.release(lease) for lease in list(unit.leases)]
        del self.touched[number]
        return leases

    def holds_alone(self, worker: Worker) -> bool:
        """Whether the worker holds a unit that runs alone, and may get no other."""
        return any(self.touched[self.leases[number].unit].alone for number in worker.leases)
