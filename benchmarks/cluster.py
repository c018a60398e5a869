"""A cluster of 1,000 workers and ten million samples in a simulated time, under the real driver, scheduler and packing.

    lengths --packing--> units --scheduler, driver--> simulated workers (three speeds; they die, hang, are drained, join)

Nothing is decoded: a worker takes tokens / speed for a unit, one unit after another, as a worker with full slots does, and
reports once in a turn. The real code decides which worker gets which unit when, which one is replaced, and when a unit is copied.
Run from the checkout:

    python -m benchmarks.cluster [--workers 1000] [--samples 10000000] [--unit-rows auto] [--seed 0]

*The bound.* Each machine can decode from the moment when a worker on it could be up (its arrival, or a death, plus the time to
load) until it fails or leaves; all this is drawn before the job begins and no scheduler can change it. The lower bound is the
earliest time at which these machines together can have generated all tokens, each once, if work could be divided at will: nothing
is lost with a death or a hang, and all machines end at the same moment. It takes each machine's mean
speed: that units deviate from it (JITTER) makes the makespan 0.25 % longer over many units. The ratio is makespan over bound.

*The driver's CPU.* CPU time of this process outside the simulation's own code over simulated seconds: scheduler, driver loop,
totals, log. Ray's own calls are not in it. *Memory* is the peak over what the process had before the job.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.plan import WINDOW, synthetic_lengths
from draftmill.actors.messages import (
    Effort,
    NodeLeaving,
    PoolEvent,
    Receipt,
    Tally,
    TurnReport,
    WorkerLoaded,
    WorkerLost,
    WorkerReported,
    WorkUnit,
    turn_s,
)
from draftmill.decoders.base import EngineStats
from draftmill.jobs.drive.driver import Driver, StopFlag
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import RunLog
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.plan.packing import auto_unit_rows, cut, longest_first, window_rows
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.jobs.schedule.units import UnitSize, UnitSizes
from draftmill.storage.runs.unit_facts import CommittedUnit, unit_name
from draftmill.storage.stores.store import MemoryStore

SPEEDS = ((0.5, 2000.0), (0.3, 1000.0), (0.2, 400.0))
"""Shares of machines, and the tokens per second that a worker on them generates: an 8B model in batches of some dozen rows on
accelerators of three generations."""

LOAD_S = 60.0
MTBF_S = 12 * 3600.0
"""Mean time between failures of a machine: at a thousand machines one fails every 43 s. It is back at once, and loads again."""

HANGS = 0.003
"""Share of machines of which one worker stops answering without dying; it is found by its lease."""

JOIN, DRAINED = 0.1, 0.02
"""Share of machines that join while the job runs, and of those that are told to go and do so NOTICE_S later."""
NOTICE_S = 120.0

JITTER = 0.05
"""Standard deviation of a unit's speed around its worker's, relative."""

STALL_S = 120.0
"""workers.stall_s of the simulated job; the default of 600 s suits devices on which a single step may take minutes."""


@dataclass(slots=True)
class Machine:
    """A place for one worker: what it does is drawn before the job begins. Times are seconds."""

    speed: float
    joins_s: float
    failures: deque[float]
    hangs_s: float
    leaves_s: float
    worker: str | None = None

    def free_spans(self, horizon_s: float) -> Iterator[tuple[float, float]]:
        """When a worker on it can decode."""
        begin = self.joins_s + LOAD_S
        for end in [*self.failures, self.leaves_s]:
            stop = min(end, self.leaves_s, horizon_s)
            if begin < stop:
                yield begin, stop
            begin = max(begin, end + LOAD_S)


@dataclass(slots=True)
class SimWorker:
    """A worker: its units in order, how many tokens of the first it has done, and since when."""

    name: str
    machine: Machine
    units: deque[WorkUnit] = field(default_factory=deque)
    ends: deque[float] = field(default_factory=deque)
    up: bool = False
    hung: bool = False
    turn_at_s: float = 0.0
    counted_s: float = 0.0


class World:
    """The pool of the driver, its clock, and all that happens on the machines."""

    def __init__(self, machines: list[Machine], seed: int) -> None:
        self.machines = machines
        self.rng = np.random.default_rng(seed + 1)
        self.now_s = 0.0
        self.own_cpu_s = 0.0
        self.workers: dict[str, SimWorker] = {}
        self.queue: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self._idle_machines: list[Machine] = []
        self._wanting: deque[str] = deque()
        self.lost = {"deaths": 0, "hangs": 0, "drained": 0, "copies": 0}
        self.leased: set[int] = set()
        for machine in machines:
            self._at(machine.joins_s, "joins", machine)
            for failure in machine.failures:
                self._at(failure, "fails", machine)
            self._at(machine.hangs_s, "hangs", machine)
            self._at(machine.leaves_s - NOTICE_S, "notice", machine)
            self._at(machine.leaves_s, "leaves", machine)
        self.turn_s = turn_s(len(machines))

    def clock(self) -> float:
        """The simulated time."""
        return self.now_s

    def _at(self, when_s: float, what: str, thing: Any) -> None:
        if np.isfinite(when_s):
            self._count += 1
            heapq.heappush(self.queue, (when_s, self._count, what, thing))

    # ---- what the driver asks for

    def room(self) -> int:
        """Machines that are there."""
        return sum(machine.joins_s <= self.now_s < machine.leaves_s for machine in self.machines)

    def start(self, name: str) -> None:
        """Put a worker on a free machine, or let it wait for one."""
        self._wanting.append(name)
        self._place()

    def _place(self) -> None:
        while self._wanting and self._idle_machines:
            machine = self._idle_machines.pop()
            if machine.leaves_s <= self.now_s:
                continue
            machine.worker = self._wanting.popleft()
            worker = self.workers[machine.worker] = SimWorker(machine.worker, machine)
            self._at(self.now_s + LOAD_S, "up", worker)

    def assign(self, name: str, unit: WorkUnit) -> None:
        """A unit behind the others of a worker."""
        worker = self.workers.get(name)
        if worker is None or worker.hung:
            return
        self.lost["copies"] += unit.unit in self.leased
        self.leased.add(unit.unit)
        began_s = max(self.now_s, worker.ends[-1] if worker.ends else self.now_s)
        speed = worker.machine.speed * max(0.5, 1 + JITTER * float(self.rng.standard_normal()))
        if not worker.units:
            worker.counted_s = self.now_s
        worker.units.append(unit)
        worker.ends.append(began_s + unit.tokens / speed)
        if len(worker.units) == 1:
            self._turn(worker)

    def revoke(self, name: str, lease: int) -> None:
        """Forget a unit; those behind it move up."""
        worker = self.workers.get(name)
        if worker is None:
            return
        starts, kept_units, kept_ends = self.now_s, deque[WorkUnit](), deque[float]()
        before = self.now_s
        for unit, end in zip(worker.units, worker.ends, strict=True):
            length = end - max(before, self.now_s)
            before = end
            if unit.lease != lease:
                starts += length
                kept_units.append(unit)
                kept_ends.append(starts)
        worker.units, worker.ends = kept_units, kept_ends
        self._turn(worker)

    def kill(self, name: str) -> None:
        """End a worker; its machine is free at once."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.machine.worker = None
            self._idle_machines.append(worker.machine)
            self._place()

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        """Let the time pass to the next thing that happens."""
        began_s = time.process_time()
        until_s = self.now_s + timeout_s
        news: list[PoolEvent] = []
        while self.queue and not news and self.queue[0][0] <= until_s:
            when_s, _, what, thing = heapq.heappop(self.queue)
            self.now_s = max(self.now_s, when_s)
            news += getattr(self, f"_{what}")(thing)
        if not news:
            self.now_s = until_s
        self.own_cpu_s += time.process_time() - began_s
        return news

    # ---- what happens

    def _joins(self, machine: Machine) -> list[PoolEvent]:
        self._idle_machines.append(machine)
        self._place()
        return []

    def _up(self, worker: SimWorker) -> list[PoolEvent]:
        if self.workers.get(worker.name) is not worker:
            return []
        worker.up = True
        return [WorkerLoaded(worker.name, "node", 1)]

    def _dies(self, machine: Machine) -> list[PoolEvent]:
        worker = self.workers.pop(machine.worker or "", None)
        machine.worker = None
        self._idle_machines.append(machine)
        self._place()
        return [WorkerLost(worker.name, "killed", not worker.units)] if worker is not None else []

    def _fails(self, machine: Machine) -> list[PoolEvent]:
        if not machine.joins_s <= self.now_s < machine.leaves_s:
            return []
        self.lost["deaths"] += 1
        return self._dies(machine)

    def _hangs(self, machine: Machine) -> list[PoolEvent]:
        worker = self.workers.get(machine.worker or "")
        if worker is not None and worker.up:
            worker.hung = True
            self.lost["hangs"] += 1
        return []

    def _notice(self, machine: Machine) -> list[PoolEvent]:
        self.lost["drained"] += 1
        return [NodeLeaving(machine.worker, NOTICE_S)] if machine.worker in self.workers else []

    def _leaves(self, machine: Machine) -> list[PoolEvent]:
        return self._dies(machine)

    def _turn(self, worker: SimWorker) -> None:
        """Plan the worker's next report: when its first unit ends, or its turn."""
        if worker.units:
            worker.turn_at_s = min(worker.ends[0], self.now_s + self.turn_s)
            self._at(max(self.now_s, worker.turn_at_s), "reports", (worker, worker.turn_at_s))

    def _reports(self, given: tuple[SimWorker, float]) -> list[PoolEvent]:
        worker, turn_at_s = given
        if self.workers.get(worker.name) is not worker or worker.hung or worker.turn_at_s != turn_at_s:
            return []
        items: list[Receipt] = []
        while worker.ends and worker.ends[0] <= self.now_s:
            unit, _ = worker.units.popleft(), worker.ends.popleft()
            facts = CommittedUnit(
                unit.unit, unit_name(unit.unit), "e" * 32, unit.rows, unit.rows, 0, 0, 1, "0" * 64, True
            )
            tally = Tally(rows=unit.rows, ok=unit.rows, new_tokens=unit.tokens)
            items.append(Receipt(unit.lease, unit.unit, worker.name, "node", facts, tally))
        took_s, worker.counted_s = self.now_s - worker.counted_s, self.now_s
        self._turn(worker)
        tokens = int(took_s * worker.machine.speed)
        effort = Effort(EngineStats(committed=tokens, steps=int(took_s * 20)), took_s)
        # Most samples of a unit have slots once half of its tokens are decoded, and those of the first are then the last.
        spent = tuple(
            u.lease for u, end in zip(worker.units, worker.ends, strict=True) if self._is_spent(worker, u, end)
        )
        return [WorkerReported(worker.name, TurnReport(tuple(items), effort, Tally(rows=1, new_tokens=tokens), spent))]

    def _is_spent(self, worker: SimWorker, unit: WorkUnit, end_s: float) -> bool:
        return end_s - self.now_s < 0.5 * unit.tokens / worker.machine.speed


def draw_machines(count: int, seed: int, about_s: float) -> list[Machine]:
    """The machines of a job that takes about `about_s`."""
    rng = np.random.default_rng(seed)
    speeds = rng.choice([speed for _, speed in SPEEDS], p=[share for share, _ in SPEEDS], size=count)
    machines = []
    for speed in speeds:
        joins_s = float(rng.uniform(0, about_s / 2)) if rng.random() < JOIN else 0.0
        gaps = np.cumsum(rng.exponential(MTBF_S, 8))
        hangs_s = float(rng.uniform(LOAD_S, about_s)) if rng.random() < HANGS else np.inf
        leaves_s = float(rng.uniform(NOTICE_S, about_s)) if rng.random() < DRAINED else np.inf
        machines.append(Machine(float(speed), joins_s, deque(gaps.tolist()), hangs_s, leaves_s))
    return machines


def pack_units(samples: int, unit_rows: int | None, seed: int) -> UnitSizes:
    """Units of samples with synthetic lengths, by the planner's own packing."""

    def sizes() -> Iterator[UnitSize]:
        rng = np.random.default_rng(seed)
        held, left, window, number, rows = np.empty(0, np.int32), samples, 0, 0, unit_rows
        while left or len(held):
            fresh = min(left, max(0, WINDOW - len(held)))
            held, left = np.concatenate([held, synthetic_lengths(rng, fresh)]), left - fresh
            end = window_rows(held, WINDOW)
            rows = rows or auto_unit_rows(end)
            lengths = held[:end][longest_first(held[:end])]
            for start, stop in cut(lengths, max_rows=rows):
                yield UnitSize(number, stop - start, int(lengths[start:stop].sum()), window)
                number += 1
            held, window = held[end:], window + 1

    return UnitSizes(sizes())


def lower_bound(machines: list[Machine], tokens: int) -> float:
    """The earliest time at which the machines can have generated that many tokens; see the module's docstring."""

    def reach(horizon_s: float) -> float:
        spans = ((machine.speed, begin, end) for machine in machines for begin, end in machine.free_spans(horizon_s))
        return sum(speed * (end - begin) for speed, begin, end in spans)

    low, high = 0.0, LOAD_S
    while reach(high) < tokens:
        low, high = high, 2 * high
        assert high < 1e12, "the machines fail or leave before they can have generated so much"
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if reach(middle) >= tokens else (middle, high)
    return high


def simulate(workers: int, samples: int, unit_rows: int | None, seed: int) -> dict[str, Any]:
    """Run one job; returns its figures, and the units that the driver recorded as committed, in order."""
    before_mb = peak_mb()
    units = pack_units(samples, unit_rows, seed)
    tokens = int(units.tokens.sum())
    mean = sum(share * speed for share, speed in SPEEDS)
    machines = draw_machines(workers, seed, LOAD_S + tokens / (workers * mean))
    world = World(machines, seed)
    totals = Totals(units=len(units), rows=samples, clock=world.clock)
    log = RunLog(clock=world.clock)
    log.attach(MemoryStore("memory://benchmark"), 1, "benchmark")
    began_s = time.process_time()
    driver = Driver(
        scheduler=Scheduler(units, workers=world.room(), limits=Limits(lease_s=STALL_S)),
        pool=world,  # type: ignore[arg-type]
        display=Display(log),
        totals=totals,
        stop=StopFlag(),
        clock=world.clock,
        room=world.room,
    )
    finish = driver.run()
    spent_s = time.process_time() - began_s - world.own_cpu_s
    assert finish.how == "done", finish
    bound_s = lower_bound(machines, tokens)
    return {
        "workers": workers,
        "samples": samples,
        "units": len(units),
        "tokens": tokens,
        "makespan_s": round(world.now_s, 1),
        "bound_s": round(bound_s, 1),
        "ratio": round(world.now_s / bound_s, 4),
        "driver_cpu_s": round(spent_s, 1),
        "driver_cores": round(spent_s / world.now_s, 3),
        "memory_mb": round(peak_mb() - before_mb, 1),
        "process_mb": round(peak_mb(), 1),
        **world.lost,
        "committed": list(driver.committed.listed),
    }


def peak_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--unit-rows", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = None if given.unit_rows == "auto" else int(given.unit_rows)
    figures = simulate(given.workers, given.samples, rows, given.seed)
    assert figures.pop("committed") == list(range(figures["units"])), "a unit is missing, or is there twice"
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
