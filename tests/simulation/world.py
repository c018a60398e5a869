"""A world to run whole jobs in: the real driver, scheduler, lease and committer against a fake store, workers and clock.

A schedule is drawn from one seed, or has one fault at one numbered access of the store. What may happen at an access:

    crash       the process (driver or worker) is gone, before or after the access took effect
    refused     the store answers with an error and has done nothing
    denied      the same, with an error that says that the user may not
    lost        the store has done it and answers with an error all the same
    pause       the driver stands still beyond its lease, another one runs, and then it goes on
    slow        every answer of one kind takes SLOW_S; who asks waits so long, be it a driver, a thread of it or a worker

and beside them: workers that die, fail or fall silent, nodes that are taken away with a notice, reports that come late or twice,
revoked leases that are decoded all the same, clocks that jump, stops, and workers of ended drivers that write long afterwards.
`Disk` watches every write.

Everything is deterministic: no thread, no real time. Nothing here knows Ray or Parquet (a unit's file is JSON).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from draftmill.actors.messages import HomeLeaving, NodeLeaving, PoolEvent, WorkerLoaded, WorkerLost, WorkerReported
from draftmill.jobs.config.sections import ErrorSettings, WorkerShape
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.leases import give_back, keep_once
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import RunLog
from draftmill.jobs.run import session
from draftmill.storage.errors import Error
from draftmill.storage.runs.commit import SUCCESS
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost, acquire
from tests.simulation.disk import Broken, Crash, Disk, Handle, Job, Process, hold
from tests.simulation.workers import FINGERPRINT, SimPool, SimSite, Worker, reported, result_of

TTL_S = 60.0
STALL_S = 20.0
MOST_TURNS = 5000
"""Turns of all drivers in a schedule, which take some hundred."""

SLOW_S = 30.0

Kind = tuple[bool, str, str]
"""A kind of access: of a driver or not, the verb, and the folder or the file."""

MOST_PAUSED = 2
"""Drivers that may stand still at once."""


class Stop(StopFlag):
    """A flag that the world sets, and no signal."""

    def on_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(slots=True)
class Fault:
    """One fault at one numbered access of the store; `at` None never strikes."""

    at: int | None
    fate: str


class SimThread:
    """A thread of a driver: what it does happens at once, and it is busy for as long as the store takes."""

    def __init__(self, world: World, target: Callable[[], object]) -> None:
        self.world, self.target = world, target
        self.until_s = world.now_s

    def start(self) -> None:
        before, self.world.thread = self.world.thread, self
        try:
            self.target()
        finally:
            self.world.thread = before

    def is_alive(self) -> bool:
        return self.world.now_s < self.until_s

    def join(self, timeout_s: float) -> None:
        self.world.now_s = max(self.world.now_s, min(self.until_s, self.world.now_s + timeout_s))


class World:
    """One schedule. `seed` draws everything; `fault` replaces the random faults by one that is given; `slow` is what is slow."""

    def __init__(
        self, job: Job, seed: int, *, faults: int = 0, fault: Fault | None = None, slow: Kind | None = None
    ) -> None:
        self.job, self.rng = job, random.Random(seed)
        self.disk = Disk(job)
        self.now_s = 1000.0
        self.left = faults
        self.fault = fault
        self.accesses = 0
        self.turns = 0
        self.struck: list[str] = []
        self.pools: list[SimPool] = []
        self.zombies: list[Worker] = []
        self.paused = 0
        self.drivers = 0
        self.stops: list[StopFlag] = []
        self.lease: Lease | None = None
        self.fair = False
        self.slow, self.kinds = slow, set[Kind]()
        self.keeper = SimThread(self, self.renew)
        self.thread: SimThread | None = None

    # ---- chance

    def chance(self, probability: float) -> bool:
        """Whether something that is no fault happens."""
        return not self.fair and self.rng.random() < probability

    def misfortune(self, probability: float, what: str) -> bool:
        """Whether a fault happens; there is a bounded number of them."""
        if self.fair or not self.left or self.rng.random() >= probability:
            return False
        self.left -= 1
        self.struck.append(what)
        return True

    def cpus(self) -> int:
        """How many CPUs the cluster has just now: machines come and go."""
        return 8 if self.fair else self.rng.randint(1, 4)

    def wait_for_answer(self, process: Process, verb: str, name: str) -> None:
        """Note the kind of an access; if that kind is slow, the caller waits for SLOW_S."""
        kind = process.is_driver, verb, name.partition("/")[0]
        self.kinds.add(kind)
        if kind != self.slow:
            return
        if not process.is_driver:
            process.busy_s = max(process.busy_s, self.now_s) + SLOW_S
        elif self.thread is not None:
            self.thread.until_s = max(self.thread.until_s, self.now_s) + SLOW_S
        else:
            for _ in range(int(SLOW_S)):
                self.now_s += 1.0
                self.keep()

    def fate(self, process: Process, verb: str, name: str) -> str:
        """What becomes of this access of the store."""
        if self.fair:
            return ""
        self.accesses += 1
        reads = verb in {"get", "list", "stat"}
        if self.fault is not None:
            if self.accesses != self.fault.at:
                return ""
            fate = self.fault.fate
        elif not self.left or self.rng.random() >= 0.06:
            return ""
        else:
            fate = self.rng.choice(
                ("crash before", "crash after", "refused", "denied", "lost", "pause before", "pause after")
            )
        if fate.startswith("pause") and not process.is_driver:
            fate = fate.replace("pause", "crash")
        if reads and fate == "lost":
            fate = "refused"
        self.left = max(0, self.left - 1)
        self.struck.append(f"{process.name}(epoch {process.epoch}): {fate} {verb} {name}")
        return fate

    # ---- drivers

    def session(self) -> str:
        """One driver from its start to its end; says how it ended."""
        self.drivers += 1
        process = Process(f"driver-{self.drivers}", is_driver=True)
        store = Handle(self, process)
        pools, before = list(self.pools), self.lease
        try:
            return self._hold_and_decode(process, store)
        except Crash:
            return "crashed"
        except (LeaseHeld, LeaseLost, Error) as error:
            return type(error).__name__
        finally:
            self.lease = before
            for pool in [pool for pool in self.pools if pool not in pools]:
                pool.close()

    def _hold_and_decode(self, process: Process, store: Handle) -> str:
        if store.exists(SUCCESS):
            return "finished"
        lease = acquire(store, process.name, TTL_S, lambda: self.now_s)
        process.epoch = lease.epoch
        self.lease, stop = lease, Stop()
        try:
            self.stops.append(stop)
            session.decode(self.run_of(process, store, lease, stop))
            return "done"
        finally:
            self.stops = [other for other in self.stops if other is not stop]
            self.lease = None  # the keeper has ended
            if process.alive:
                give_back(lease)

    def run_of(self, process: Process, store: Handle, lease: Lease, stop: StopFlag):
        """What `draftmill.jobs.run.session.decode` wants to know."""
        spec = SimpleNamespace(
            name="simulated",
            shapes=(WorkerShape(count=self.job.workers, stall_s=STALL_S if self.slow is None else 600.0),),
            errors=ErrorSettings(attempts=self.job.attempts),
            model=SimpleNamespace(device="cpu"),
            decoder=SimpleNamespace(kind="autoregressive"),
            input=SimpleNamespace(run=None),
        )
        resolved = SimpleNamespace(
            spec=spec,
            recipe=SimpleNamespace(task=None),
            folder=Path("no-model"),
            info=SimpleNamespace(num_parameters=1),
            process=(self, process),
        )
        plan = SimpleNamespace(
            units=len(self.job.rows),
            rows=sum(self.job.rows),
            tokens=sum(self.job.rows),
            store=store,
            fingerprint=FINGERPRINT,
            sizes=self.job.sizes,
            pass_=1,
            files=(),
            totals=SimpleNamespace(errors={}),
        )
        options = SimpleNamespace(ray_address=None, grace_s=5.0, local=True)
        return SimpleNamespace(
            resolved=resolved,
            options=options,
            plan=plan,
            lease=lease,
            stop=stop,
            display=Display(RunLog(clock=lambda: self.now_s)),
            backend=SimSite(self),
            loads=True,
            watchers=(),
        )

    def pause(self) -> None:
        """This driver stands still: its lease runs out, another driver comes, and then it goes on."""
        if self.paused >= MOST_PAUSED:
            return
        self.paused += 1
        self.now_s += TTL_S * self.rng.choice((0.2, 1.5))
        self.session()
        self.paused -= 1

    def keep(self) -> None:
        """What the keeper's thread does, once in a while."""
        is_due = self.lease is not None and self.now_s > self.lease.expires_at_s - 0.75 * self.lease.ttl_s
        if is_due and not self.keeper.is_alive():
            self.keeper.start()

    def renew(self) -> None:
        """What it does then."""
        assert self.lease is not None
        keep_once(self.lease, self.stops[-1].set)

    # ---- workers

    def turn(self, pool: SimPool) -> list[PoolEvent]:
        """Time passes, and some of the pool's workers do something; zombies do, too."""
        self.turns += 1
        hold(self.turns < MOST_TURNS, "the job does not end")
        self.now_s += 0.2
        if self.misfortune(0.02, "the clock jumps"):
            self.now_s += self.rng.choice((2.0, TTL_S, 2 * STALL_S))
        if self.misfortune(0.01, "a stop"):
            self.stops[-1].set("SIGTERM")
        self.keep()
        self.haunt()
        events: list[PoolEvent] = []
        if self.misfortune(0.005, "the driver's node is to go"):
            events.append(HomeLeaving(self.rng.choice((None, 1.0))))
        for worker in list(pool.workers.values()):
            self.act(worker)
            events += self.delivered(worker)
        return events

    def haunt(self) -> None:
        """Whoever is written off, or has a driver that is gone or stands still, may still commit what it holds."""
        others = [worker for pool in self.pools[:-1] for worker in pool.workers.values()]
        for worker in [*self.zombies, *others]:
            if worker.units and self.chance(0.1):
                self.decode(worker)
                worker.mail.clear()

    def act(self, worker: Worker) -> None:
        if worker.silent:
            return
        if worker.process.busy_s > self.now_s:
            return
        if not worker.up:
            worker.up = not self.chance(0.2)
            worker.mail += [WorkerLoaded(worker.name, "node", 1)] if worker.up else []
        elif self.misfortune(0.01, f"{worker.name} dies") or (worker.leaving and self.chance(0.2)):
            worker.process.alive = False
        elif self.misfortune(0.01, f"{worker.name}'s node is to go"):
            worker.leaving = True
            worker.mail.append(NodeLeaving(worker.name, 2.0))
        elif self.misfortune(0.01, f"{worker.name} falls silent"):
            worker.silent = True
        elif worker.units and not self.chance(0.4):
            self.decode(worker)
        else:
            spent = tuple(unit.lease for unit in worker.units) if self.chance(0.7) else ()
            worker.mail.append(reported(worker, spent=spent))
        if not worker.process.alive:
            worker.mail.append(WorkerLost(worker.name, "killed"))
            worker.silent = True

    def decode(self, worker: Worker) -> None:
        """The worker ends one of its units, one way or another."""
        unit = worker.units.pop(self.rng.randrange(len(worker.units)) if self.chance(0.3) else 0)
        try:
            item = result_of(self, worker, unit)
        except Crash:
            return
        worker.mail.append(reported(worker, item))
        if self.chance(0.1):
            worker.mail.append(reported(worker, item))

    def delivered(self, worker: Worker) -> list[PoolEvent]:
        """The reports that arrive now; a worker's come in order, some of them late."""
        if worker.process.busy_s > self.now_s:  # the store has not answered: what is asked of it is in no report yet
            return [reported(worker)]
        if self.chance(0.2) and not (worker.mail and isinstance(worker.mail[-1], WorkerLost)):
            return []
        mail, worker.mail = worker.mail, []
        if worker.mail or not mail or not isinstance(mail[-1], WorkerLost) or not self.chance(0.5):
            return mail
        return [item for item in mail if not isinstance(item, WorkerReported)]  # a death takes the last reports with it

    # ---- the end

    def finish(self) -> None:
        """From here on nothing goes wrong but what is poisoned, until the job is done; then the last zombies write."""
        self.fair = True
        for _ in range(6):
            self.now_s += 2 * TTL_S
            if self.session() == "finished":
                break
        else:
            raise Broken("the job does not end")
        for worker in self.zombies:
            while worker.units:
                self.decode(worker)
