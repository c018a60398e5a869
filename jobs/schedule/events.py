"""What happens to a scheduler (events) and what it asks for (commands): frozen, plain, comparable.

Time is in seconds of whatever clock the driver uses; only `Tick` carries it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.messages import FailureKind, WorkUnit


@dataclass(frozen=True, slots=True)
class Tick:
    """The time is now `now_s`; never earlier than the last one."""

    now_s: float


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker that was asked for has loaded its model and takes units."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker is gone, or never came up. `idle` if nothing that it was given had reached it: no row of that is to blame.

    `device` if its device was lost: that is the machine's fault, unless it follows a unit from worker to worker.
    """

    worker: str
    reason: str
    idle: bool = False
    device: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """A worker's machine will soon be taken away."""

    worker: str


@dataclass(frozen=True, slots=True)
class MoreRoom:
    """Machines have joined: there is room for so many workers in all."""

    workers: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker answered; of the `spent` leases most samples have got a slot.

    If it has `moved` anything forward since it was last heard of, its leases run on; to be alive is not enough.
    """

    worker: str
    spent: tuple[int, ...] = ()
    moved: bool = True


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit's file is in the store: a fact, whether or not the lease still stands."""

    lease: int
    unit: int


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """The rows of a probe were decoded and their worker lives."""

    lease: int
    unit: int


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """A leased unit came to nothing while its worker lives on."""

    lease: int
    unit: int
    kind: FailureKind
    error_kind: str
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Lease no more; finish when what runs has ended."""


Event = Tick | WorkerUp | WorkerDied | WorkerLeaving | MoreRoom | Heard | UnitDone | ProbeDone | UnitFailed | Drain


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Bring up a worker of this name."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End this worker; the scheduler has already written it off."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """End this worker, which leaves and holds nothing more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Hand this unit to this worker."""

    worker: str
    unit: WorkUnit


@dataclass(frozen=True, slots=True)
class Revoke:
    """The worker may forget this lease: the unit is done elsewhere, or the job is draining."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """For the record: these rows of the unit will come back failed."""

    unit: int
    start: int
    stop: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do: every unit is done, the job was drained, too much of it failed, or it can't go on."""

    how: Literal["done", "drained", "hopeless", "failed"]
    message: str = ""


Command = StartWorker | KillWorker | LetGo | Assign | Revoke | Quarantine | Finish
