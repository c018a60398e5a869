"""UnitRunner: the decode loop of a worker. It keeps the decoder's slots full from the units it holds.

One thread decodes. Another, for the UnitIO, reads and tokenizes the rows of the next unit and writes the files of finished
units, so that neither stalls the slots. The loop knows no text, no files and no Ray. It admits samples longest first, those
that begin alike after one another (`in_order`), those of the older unit before those of the newer. When a unit runs out of
samples, free slots are filled from the next unit.

When the decoder raises, its samples are decoded again one at a time: a sample that fails alone is quarantined, the others
succeed. Such steps are counted, and the first error of each type is logged with its trace. When memory runs out, the number of
rows is halved, and grows again later (`RowLimit`). When the device is lost, this process can decode nothing more: `step` raises
DeviceLostError, and the caller must end the worker (faults.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.actors.faults import DeviceLostError, let_go, lost_device, ran_out_of_memory
from draftmill.actors.messages import CHANGED_INPUT, MOST_UNITS, STORE_FULL, Effort, Failure, Receipt, Tally, WorkUnit
from draftmill.actors.planning.beginnings import beginnings, group_by_beginning
from draftmill.actors.rows.samples import LoopMeter, Sample, length_of
from draftmill.decoders.base import HOLE, Decoder, Outcome
from draftmill.storage.errors import ChangedInput, DamagedRun, RowError, StoreError, StoreFull, UserError

_log = logging.getLogger(__name__)


class UnitIO(Protocol):
    """The part of a worker that handles rows, text and files. Called from one thread only, never the decode loop's."""

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        """Read the unit's rows and make their canvases; a failed row is a Sample with its error."""
        ...

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        """Build the result rows and commit them; for a probe, only build them."""
        ...


@dataclass(slots=True, eq=False)
class OpenUnit:
    """A unit that the runner holds. `left` counts its unfinished samples; `job` is the UnitIO's current work on it, if any.

    `spent_s` is its share of the loop's time so far. `again` are samples that returned their slot but have more holes to fill:
    they go before those in `waiting`.
    """

    unit: WorkUnit
    job: Future[Any] | None
    samples: list[Sample] = field(default_factory=list)
    waiting: deque[Sample] = field(default_factory=deque)
    again: deque[Sample] = field(default_factory=deque)
    left: int = 0
    queued_at_s: float = 0.0
    opened: bool = False
    closing: bool = False
    spent_s: float = 0.0


class UnitRunner:
    """Decodes a few units at once with one decoder; the owner calls `add` and `step`. `facts` are for the run's log."""

    def __init__(
        self, decoder: Decoder, unit_io: UnitIO, *, worker: str = "worker", facts: dict[str, Any] | None = None
    ) -> None:
        self.decoder = decoder
        self.unit_io = unit_io
        self.worker = worker
        self.facts = facts or {}
        self.limit = RowLimit()
        self._open: dict[int, OpenUnit] = {}
        self._resident: dict[int, tuple[OpenUnit, Sample]] = {}
        self._suspects: deque[tuple[OpenUnit, Sample]] = deque()
        self._handles = 0
        self._logged = set[type[Exception]]()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unit_io")
        self._answers: list[Receipt | Failure] = []
        self._meter = LoopMeter(decoder)
        self._decoded = Counter[OpenUnit]()

    @property
    def held(self) -> int:
        """Number of units held."""
        return len(self._open)

    @property
    def spent(self) -> tuple[int, ...]:
        """Leases of the units with at most half of their samples still waiting for a slot."""
        opened = (unit for unit in self._open.values() if unit.opened)
        return tuple(unit.unit.lease for unit in opened if 2 * len(unit.waiting) <= len(unit.samples))

    @property
    def waiting(self) -> int:
        """Samples that have ended and whose units are not committed yet."""
        return sum(len(unit.samples) - unit.left for unit in self._open.values() if not unit.unit.probe)

    def add(self, unit: WorkUnit) -> None:
        """Add a unit; its rows are read while the decoder continues."""
        assert self.held < MOST_UNITS, "more units than the scheduler may assign"
        self._open[unit.lease] = OpenUnit(unit, self._thread.submit(self.unit_io.open_unit, unit))

    def drop(self, lease: int) -> None:
        """Forget a unit that is no longer needed; ignores the outcomes of its samples that hold a slot."""
        self._open.pop(lease, None)
        if not self._open:
            self.decoder.clear()
            self._resident.clear()
            self._suspects.clear()

    def step(self) -> list[Receipt | Failure]:
        """Run one forward for all slots; returns the units that ended.

        Waits only if there is nothing to decode and the UnitIO is still reading or writing.
        """
        held = dict(self._open)
        self._meter.start(bool(held))
        self._collect(block=not self._resident and not self._ready)
        self._decode()
        self._share(held, self._meter.stop(drained=not self._ready))
        answers, self._answers = self._answers, []
        return [
            replace(item, spent_s=held[item.lease].spent_s) if isinstance(item, Receipt) else item for item in answers
        ]

    def _share(self, held: dict[int, OpenUnit], took_s: float) -> None:
        """Divide a step's time among the units with samples in the slots, by their number; without such, among those held."""
        shares = self._decoded or Counter(held.values())
        for unit, count in shares.items():
            unit.spent_s += took_s * count / shares.total()

    def take_effort(self) -> tuple[Effort, Tally]:
        """The effort since the last call, and the sums over the samples that ended."""
        return self._meter.take()

    def close(self) -> None:
        """Wait for the UnitIO and end its thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- the side of the UnitIO

    @property
    def _ready(self) -> bool:
        return bool(self._suspects) or any(unit.waiting or unit.again for unit in self._open.values())

    def _collect(self, *, block: bool) -> None:
        """Process the UnitIO's finished work; with `block`, wait for it if the UnitIO is busy."""
        jobs = [unit.job for unit in self._open.values() if unit.job is not None]
        if block and jobs:
            wait(jobs, return_when=FIRST_COMPLETED)
        for unit in list(self._open.values()):
            if unit.job is not None and unit.job.done():
                self._process(unit, unit.job)

    def _process(self, unit: OpenUnit, job: Future[Any]) -> None:
        unit.job = None
        error = job.exception()
        if error is not None:
            self._open.pop(unit.unit.lease)
            stage = "store" if unit.closing else "read"
            self._answers.append(unit_failure(unit.unit, error, worker=self.worker, stage=stage))
        elif unit.closing:
            self._answers.append(job.result())
            self._open.pop(unit.unit.lease)
        else:
            self._admit_rows(unit, job.result())

    def _admit_rows(self, unit: OpenUnit, samples: list[Sample]) -> None:
        unit.samples, unit.opened = samples, True
        unit.queued_at_s = time.perf_counter()
        runnable = in_order([sample for sample in samples if sample.canvas is not None])
        unit.waiting.extend(runnable)
        unit.left = len(runnable)
        for sample in samples:
            if sample.canvas is None:
                self._meter.count(sample)
        self._close_if_ended(unit)

    def _close_if_ended(self, unit: OpenUnit) -> None:
        if unit.left == 0 and unit.unit.lease in self._open:
            unit.closing = True
            unit.job = self._thread.submit(self.unit_io.close_unit, unit.unit, unit.samples)

    # ---- the decoder's side

    def _decode(self) -> None:
        """The error boundary of the worker: an exception of the decoder ends the samples that caused it, not the worker."""
        self._decoded.clear()
        try:
            self._admit()
            self._decoded.update(unit for unit, _ in self._resident.values())
            rows = len(self._resident)
            outcomes = self.decoder.step() if self._resident else []
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything; the failing sample is then found
            self._decoder_failed(error)
            return
        self.limit.count_step(rows)
        for outcome in outcomes:
            unit, sample = self._resident.pop(outcome.index)
            self._take_outcome(unit, sample, outcome)

    def _admit(self) -> None:
        if self._suspects:
            if not self._resident:
                self._give_slots([self._suspects.popleft()])
            return
        for unit in list(self._open.values()):
            while unit.again:  # one by one: they are not sorted by length
                if not self._room(length_of(unit.again[0])):
                    return
                self._give_slots([(unit, unit.again.popleft())])
            while unit.waiting:
                room = self._room(length_of(unit.waiting[0]))
                if not room:
                    return
                count = min(room, len(unit.waiting))
                self._give_slots([(unit, unit.waiting.popleft()) for _ in range(count)])

    def _room(self, length: int) -> int:
        room = self.decoder.room(length)
        if not self._resident:
            room = max(room, 1)  # admit even a sample that does not fit an empty decoder: it fails with its own error
        return self.limit.room(room, len(self._resident))

    def _give_slots(self, samples: list[tuple[OpenUnit, Sample]]) -> None:
        requests = []
        for unit, sample in samples:
            self._resident[self._handles] = (unit, sample)
            requests.append(sample.request(self._handles))
            self._handles += 1
        queued = [unit.queued_at_s if sample.queued_at_s is None else sample.queued_at_s for unit, sample in samples]
        self.decoder.admit(requests, queued_at_s=queued)

    def _decoder_failed(self, error: Exception) -> None:
        if lost_device(error):
            raise DeviceLostError(f"{type(error).__name__}: {error}") from None
        if not self._resident:
            raise error  # no sample is to blame: the decoder is broken, so this worker is too
        dropped = [self._resident[handle] for handle in sorted(self._resident)]
        self._resident.clear()
        self.decoder.clear()
        out_of_memory = ran_out_of_memory(error)
        if out_of_memory:
            try:
                let_go(error)
            except RuntimeError as refusal:  # if the allocator can't even free memory, memory was not the problem
                raise DeviceLostError(f"{type(refusal).__name__}: {refusal}, after {error}") from None
        if len(dropped) == 1:
            unit, sample = dropped[0]
            kind = "out_of_memory" if out_of_memory else "decode_error"
            sample.error = RowError(kind, "decode", f"{type(error).__name__}: {error}")
            self._sample_ended(unit, sample)
        elif out_of_memory:
            self.limit.ran_out(len(dropped))
            for unit, sample in reversed(dropped):
                (unit.again if sample.has_begun else unit.waiting).appendleft(sample)
        else:
            self._suspects.extend(dropped)
        if not out_of_memory:
            self.decoder.stats.raised += 1
            if type(error) not in self._logged:
                self._logged.add(type(error))
                _log.warning("A step of %d samples raised; each is decoded again alone.", len(dropped), exc_info=error)

    def _take_outcome(self, unit: OpenUnit, sample: Sample, outcome: Outcome) -> None:
        if sample.take(outcome):
            unit.again.append(sample)
            return
        if outcome.error_kind is not None:
            sample.error = RowError(outcome.error_kind, "decode", outcome.error or outcome.error_kind)
        self._sample_ended(unit, sample)

    def _sample_ended(self, unit: OpenUnit, sample: Sample) -> None:
        unit.left -= 1
        self._meter.count(sample)
        self._close_if_ended(unit)


def unit_failure(unit: WorkUnit, error: BaseException, *, worker: str, stage: str) -> Failure:
    """The failure of a unit: INFRA for errors of stores and machines, TASK for all others, which its rows may cause."""
    infra = isinstance(error, StoreError | UserError | OSError)
    remedy = "; put the planned content back" if isinstance(error, ChangedInput) else ""
    kinds = ((StoreFull, STORE_FULL), (ChangedInput, CHANGED_INPUT), (DamagedRun, CHANGED_INPUT))
    return Failure(
        lease=unit.lease,
        unit=unit.unit,
        worker=worker,
        kind="INFRA" if infra else "TASK",
        error_kind=next((kind for of, kind in kinds if isinstance(error, of)), "store" if infra else "worker_error"),
        stage=stage,
        error=f"{error}{remedy}" if isinstance(error, StoreError | UserError) else f"{type(error).__name__}: {error}",
    )


QUIET_STEPS = 64
MOST_QUIET_STEPS = 64 * 1024


@dataclass(slots=True)
class RowLimit:
    """Limits how many rows are decoded at once; `rows` is None until memory runs out for the first time.

    Memory runs out when many long samples are decoded together, which is temporary. So the limit is halved at once, and grows
    again by an eighth after a number of steps at the limit without failure. Each further failure doubles that number of steps.
    """

    rows: int | None = None
    _quiet: int = 0
    _quiet_needed: int = QUIET_STEPS // 2

    def ran_out(self, rows: int) -> None:
        """Note that memory ran out with `rows` rows."""
        self.rows = max(1, rows // 2)
        self._quiet, self._quiet_needed = 0, min(2 * self._quiet_needed, MOST_QUIET_STEPS)

    def count_step(self, rows: int) -> None:
        """Note a successful step with `rows` rows; steps below the limit don't count."""
        if self.rows is None or rows < self.rows:
            return
        self._quiet += 1
        if self._quiet >= self._quiet_needed:
            self.rows, self._quiet = self.rows + max(1, self.rows // 8), 0

    def room(self, room: int, resident: int) -> int:
        """A decoder's room under this limit, given the number of `resident` rows."""
        return room if self.rows is None else min(room, self.rows - resident)


def in_order(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, each with a canvas, in the order in which they are admitted: longest first, those that begin alike after one
    another.

    Groups (planning/beginnings.py) are ordered by their longest sample, and so are the samples of a group. The order changes no
    result, only what is computed twice.
    """
    ranked = sorted(samples, key=lambda sample: (-length_of(sample), sample.index))
    column = pa.chunked_array([beginnings([_beginning(sample) for sample in ranked])])
    return [ranked[number] for number in group_by_beginning(column, np.arange(len(ranked))).order.tolist()]


def _beginning(sample: Sample) -> NDArray[np.int32]:
    """The tokens before the first one to generate, as the plan notes them: room for more is nothing that texts share."""
    assert sample.canvas is not None, "a row without a canvas is not decoded"
    holes = np.flatnonzero(sample.canvas == HOLE)
    return sample.canvas[: holes[0]] if len(holes) else sample.canvas
