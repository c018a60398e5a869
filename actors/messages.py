"""The frozen messages between the driver and its workers.

Plain data, cheap to pickle, without tensors, tables or text. A `WorkUnit` goes out; a `Receipt` or a `Failure` comes
back inside a `TurnReport`. Nothing here knows Ray, files or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from draftmill.decoders.base import EngineStats

if TYPE_CHECKING:
    from draftmill.storage.runs.unit_facts import CommittedUnit

FailureKind = Literal["TASK", "INFRA"]
"""TASK: this unit's data raised an exception. INFRA: the store or the machine failed; the data is not to blame."""

STORE_FULL = "store_full"
"""The `error_kind` of an INFRA failure whose reason is a full disk: a retry helps only once somebody makes room."""

CHANGED_INPUT = "changed_input"
"""The `error_kind` of an INFRA failure whose reason is an input that is not what was planned, or a damaged file of results: a
retry never helps."""

MOST_UNITS = 4
"""Maximum units that a worker holds: one that waits, and those that are being decoded or written."""

LEAST_S: Final = 0.2


def turn_s(workers: int) -> float:
    """Seconds that a worker decodes before it reports: longer, the more workers there are, so that one driver can listen to all.

    A finished unit ends a turn at once.
    """
    return min(5.0, max(LEAST_S, workers / 500))  # a report costs the driver some 50 us, and Ray several times as much


@dataclass(frozen=True, slots=True)
class QuarantinedRows:
    """Rows [start, stop) of a unit that are never decoded again: they are returned as failed, with this error."""

    start: int
    stop: int
    kind: str
    stage: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A unit as leased to one worker.

    `lease` identifies this assignment; answers repeat it. `attempt` counts from 1. A probe decodes only the rows
    [start, stop) and commits nothing: it tests whether a worker survives them.
    """

    lease: int
    unit: int
    rows: int
    tokens: int
    attempt: int
    pass_: int
    start: int
    stop: int
    probe: bool = False
    verdicts: tuple[QuarantinedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over the rows of one unit or of many, for the table at the end of a run."""

    rows: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    nfe: int = 0
    nfe_draft: int = 0
    iterations: int = 0
    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in Tally.__slots__))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A unit was committed, or a probe survived (then `committed` is None).

    `spent_s` is the unit's share of its worker's time, `commit_s` the time to write its file; seconds.
    """

    lease: int
    unit: int
    worker: str
    node: str
    committed: CommittedUnit | None
    tally: Tally
    error_kinds: dict[str, int] = field(default_factory=dict)
    spent_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A leased unit failed, and why."""

    lease: int
    unit: int
    worker: str
    kind: FailureKind
    error_kind: str
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Effort:
    """What a worker's decode loop did, for the efficiency figures.

    `engine` holds differences. `wall_s` is the loop's time while it held units, `tail_s` the part of it in which slots were
    idle because no more samples were available.
    """

    engine: EngineStats = field(default_factory=EngineStats)
    wall_s: float = 0.0
    tail_s: float = 0.0

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.engine + other.engine, self.wall_s + other.wall_s, self.tail_s + other.tail_s)


@dataclass(frozen=True, slots=True)
class TurnReport:
    """The result of one call of a worker: answers, and the effort and the ended samples since the last call.

    `spent` lists the leases most of whose samples have a slot: the worker could take another unit. `waiting` is a level, not a
    difference: the samples that have ended and whose units are not committed yet.
    """

    answers: tuple[Receipt | Failure, ...]
    effort: Effort
    decoded: Tally
    spent: tuple[int, ...] = ()
    waiting: int = 0

    @property
    def moved(self) -> bool:
        """Whether there was progress: a token was committed, or a sample or a unit ended."""
        return bool(self.answers or self.decoded.rows or self.effort.engine.committed)


@dataclass(frozen=True, slots=True)
class WorkerLoaded:
    """The worker has loaded its model, on this node and in this process; `facts` are its findings and choices, for the log."""

    worker: str
    node: str
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker died, or never came up; `reason` is one line. `idle` if none of its units had reached it: no row is to blame.

    `device` if its device was lost: the machine is to blame, unless a unit loses devices on several workers.
    """

    worker: str
    reason: str
    idle: bool = False
    device: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """The report of one turn of a worker."""

    worker: str
    report: TurnReport


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The worker's node will be removed within `left_s` seconds; None if the time is unknown."""

    worker: str
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class HomeLeaving:
    """The driver's own node will be removed."""

    left_s: float | None


PoolEvent = WorkerLoaded | WorkerLost | WorkerReported | NodeLeaving | HomeLeaving
