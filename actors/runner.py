"""UnitRunner: the decode loop of a worker. It keeps the decoder's slots full from the units it holds.

One thread decodes; another, the clerk's, reads and tokenizes the rows of the next unit and writes the files of ended
ones, so that neither stalls the slots. The loop sees no text, no file and no Ray. Samples go in longest first, those of
the older unit before those of the newer; a unit that runs out of samples is topped up from the next, never drained.

When the decoder raises, its samples are decoded again one at a time: who fails alone is quarantined, its neighbours come
back ok. When memory runs out, the rows are halved, and grow again later (row_limit.py). When the device is lost, nothing more can
be decoded here: `step` raises DeviceLostError, and the worker's end is up to the caller (faults.py).
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.faults import DeviceLostError, let_go, lost_device, ran_out_of_memory
from actors.messages import MOST_UNITS, Effort, Failure, Receipt, Tally, WorkUnit
from actors.row_limit import RowLimit
from actors.samples import Meter, Sample, length_of
from decoders.base import Decoder, Outcome
from storage.errors import RowError, StoreError, UserError


class Clerk(Protocol):
    """The side of a worker that knows rows, text and files. Called from one thread only, never from the decode loop's."""

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        """Read the unit's rows and make their canvases; a row that fails is a Sample with its error."""
        ...

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        """Make the result rows and commit them (a probe: make them only)."""
        ...


@dataclass(slots=True, eq=False)
class Open:
    """A unit in hand. `left` counts the samples that have not ended; `job` is what the clerk does for it now, if anything.

    `again` are samples that gave their slot back with holes left to fill: they come before those that `waiting` holds.
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


class UnitRunner:
    """Decodes a few units at once with one decoder; the owner calls `add` and `step`. `facts` are for the run's record."""

    def __init__(
        self, decoder: Decoder, clerk: Clerk, *, worker: str = "worker", facts: dict[str, Any] | None = None
    ) -> None:
        self.decoder = decoder
        self.clerk = clerk
        self.worker = worker
        self.facts = facts or {}
        self.limit = RowLimit()
        self._open: dict[int, Open] = {}
        self._resident: dict[int, tuple[Open, Sample]] = {}
        self._suspects: deque[tuple[Open, Sample]] = deque()
        self._handles = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clerk")
        self._news: list[Receipt | Failure] = []
        self._meter = Meter(decoder)

    @property
    def held(self) -> int:
        """Number of units in hand."""
        return len(self._open)

    @property
    def spent(self) -> tuple[int, ...]:
        """Leases of the units of which at most half of the samples still wait for a slot."""
        opened = (unit for unit in self._open.values() if unit.opened)
        return tuple(unit.unit.lease for unit in opened if 2 * len(unit.waiting) <= len(unit.samples))

    def add(self, unit: WorkUnit) -> None:
        """Take a unit in; its rows are read while the slots go on."""
        assert self.held < MOST_UNITS, "more units than the scheduler may hand out"
        self._open[unit.lease] = Open(unit, self._thread.submit(self.clerk.open_unit, unit))

    def drop(self, lease: int) -> None:
        """Forget a unit that nobody waits for any more; its samples that hold a slot are ignored when they end."""
        self._open.pop(lease, None)
        if not self._open:
            self.decoder.clear()
            self._resident.clear()
            self._suspects.clear()

    def step(self) -> list[Receipt | Failure]:
        """Move every slot on by one forward; returns the units that ended.

        Waits only if there is nothing to decode while the clerk still reads or writes.
        """
        self._meter.start(bool(self._open))
        self._collect(block=not self._resident and not self._ready)
        self._decode()
        self._meter.stop(drained=not self._ready)
        news, self._news = self._news, []
        return news

    def take_effort(self) -> tuple[Effort, Tally]:
        """What was done since the last call, and the sums over the samples that ended."""
        return self._meter.take()

    def close(self) -> None:
        """Wait for the clerk and end its thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---- the clerk's side

    @property
    def _ready(self) -> bool:
        """Whether a sample waits for a slot."""
        return bool(self._suspects) or any(unit.waiting or unit.again for unit in self._open.values())

    def _collect(self, *, block: bool) -> None:
        """Take in what the clerk has finished; `block` until it has, if it is at work."""
        jobs = [unit.job for unit in self._open.values() if unit.job is not None]
        if block and jobs:
            wait(jobs, return_when=FIRST_COMPLETED)
        for unit in list(self._open.values()):
            if unit.job is not None and unit.job.done():
                self._clerk_did(unit, unit.job)

    def _clerk_did(self, unit: Open, job: Future[Any]) -> None:
        unit.job = None
        error = job.exception()
        if error is not None:
            self._fail_unit(unit, error)
        elif unit.closing:
            self._news.append(job.result())
            self._open.pop(unit.unit.lease)
        else:
            self._opened(unit, job.result())

    def _opened(self, unit: Open, samples: list[Sample]) -> None:
        unit.samples, unit.opened = samples, True
        unit.queued_at_s = time.perf_counter()
        runnable = [sample for sample in samples if sample.canvas is not None]
        runnable.sort(key=lambda sample: (-length_of(sample), sample.index))
        unit.waiting.extend(runnable)
        unit.left = len(runnable)
        self._close_if_ended(unit)

    def _close_if_ended(self, unit: Open) -> None:
        if unit.left == 0 and unit.unit.lease in self._open:
            unit.closing = True
            unit.job = self._thread.submit(self.clerk.close_unit, unit.unit, unit.samples)

    def _fail_unit(self, unit: Open, error: BaseException) -> None:
        self._open.pop(unit.unit.lease)
        infra = isinstance(error, StoreError | UserError | OSError)
        failure = Failure(
            lease=unit.unit.lease,
            unit=unit.unit.unit,
            worker=self.worker,
            kind="INFRA" if infra else "TASK",
            error_kind="store" if infra else "worker_error",
            stage="store" if unit.closing else "read",
            error=f"{type(error).__name__}: {error}",
        )
        self._news.append(failure)

    # ---- the decoder's side

    def _decode(self) -> None:
        """The worker's boundary: whatever the decoder raises ends the samples that caused it, not the worker."""
        try:
            self._admit()
            rows = len(self._resident)
            outcomes = self.decoder.step() if self._resident else []
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything; the culprit is then found and named
            self._decoder_failed(error)
            return
        self.limit.stepped(rows)
        for outcome in outcomes:
            self._finished(*self._resident.pop(outcome.index), outcome)

    def _admit(self) -> None:
        if self._suspects:
            if not self._resident:
                self._give_slots([self._suspects.popleft()])
            return
        for unit in list(self._open.values()):
            while unit.again:  # one by one: their lengths are in no order
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
            room = max(room, 1)  # one that does not fit an empty decoder is admitted, and fails by name
        return self.limit.room(room, len(self._resident))

    def _give_slots(self, samples: list[tuple[Open, Sample]]) -> None:
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
            raise error  # no sample is to blame: the decoder itself is broken, and so is this worker
        dropped = [self._resident[handle] for handle in sorted(self._resident)]
        self._resident.clear()
        self.decoder.clear()
        starved = ran_out_of_memory(error)
        if starved:
            self._let_go(error)
        if len(dropped) == 1:
            unit, sample = dropped[0]
            kind = "out_of_memory" if starved else "decode_error"
            sample.error = RowError(kind, "decode", f"{type(error).__name__}: {error}")
            self._sample_ended(unit, sample)
        elif starved:
            self.limit.starved(len(dropped))
            for unit, sample in reversed(dropped):
                (unit.again if sample.parts else unit.waiting).appendleft(sample)
        else:
            self._suspects.extend(dropped)

    def _let_go(self, error: Exception) -> None:
        try:
            let_go(error)
        except RuntimeError as refusal:  # of an allocator that can't even free: it was not memory that was missing
            raise DeviceLostError(f"{type(refusal).__name__}: {refusal}, after {error}") from None

    def _finished(self, unit: Open, sample: Sample, outcome: Outcome) -> None:
        if sample.take(outcome):
            unit.again.append(sample)
            return
        if outcome.error_kind is not None:
            sample.error = RowError(outcome.error_kind, "decode", outcome.error or outcome.error_kind)
        self._sample_ended(unit, sample)

    def _sample_ended(self, unit: Open, sample: Sample) -> None:
        unit.left -= 1
        self._meter.count(sample)
        self._close_if_ended(unit)
