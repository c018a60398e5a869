"""The scheduler's inputs (events) and outputs (commands): frozen, plain, comparable data.

What workers report is an event as it comes (actors/messages.py); the answers in a report come before it, each by itself. Times
are in seconds of the driver's clock; only `Tick` carries one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftmill.actors.messages import (
    Failure,
    NodeLeaving,
    QuarantinedRows,
    Receipt,
    WorkerLoaded,
    WorkerLost,
    WorkerReported,
    WorkUnit,
)


@dataclass(frozen=True, slots=True)
class Tick:
    """The time is now `now_s`, never earlier than in the previous tick."""

    now_s: float


@dataclass(frozen=True, slots=True)
class MoreRoom:
    """Machines have joined: there is now room for `workers` workers in total."""

    workers: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop leasing units; finish when the running ones have ended."""


Event = Tick | WorkerLoaded | WorkerLost | NodeLeaving | MoreRoom | WorkerReported | Receipt | Failure | Drain
"""A Receipt holds even if its lease is no longer valid: the unit's file is in the store."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker with this name."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End this worker; the scheduler has already removed it."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """End this worker: its machine is leaving, or no unit is left for it. `lost` if it still held leases."""

    worker: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Assign:
    """Send this unit to this worker."""

    worker: str
    unit: WorkUnit


@dataclass(frozen=True, slots=True)
class Revoke:
    """The worker may forget this lease: the unit is done elsewhere, or the job is draining."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """For the log only: these rows of the unit will be returned as failed."""

    unit: int
    rows: QuarantinedRows


@dataclass(frozen=True, slots=True)
class Finish:
    """The job ends: every unit is done, it was drained, too many samples failed, the disk is full, it can't continue now, or it
    can't continue until somebody puts a file right."""

    how: Literal["done", "drained", "hopeless", "full", "failed", "unusable"]
    message: str = ""


Command = StartWorker | KillWorker | LetGo | Assign | Revoke | Quarantine | Finish
