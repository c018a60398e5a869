"""A decoder without a model, and a UnitIO without files, for tests of the loop around them."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.loop.worker import Turns
from draftmill.actors.messages import Failure, QuarantinedRows, Receipt, WorkUnit
from draftmill.actors.metrics.base import Measuring
from draftmill.actors.rows.samples import Sample, tally_of
from draftmill.decoders.base import HOLE, EngineStats, Outcome, Request
from draftmill.storage.errors import RowError

ENDLESS = 98
LOSES_DEVICE = 97


class FakeDecoder:
    """Fills one hole of every sample a step with the hole's position; `trouble(requests)` may raise before a step."""

    def __init__(self, max_rows: int = 4, *, trouble: Callable[[list[Request]], None] | None = None) -> None:
        self.stats = EngineStats()
        self.max_rows = max_rows
        self.trouble = trouble
        self.inside: dict[int, tuple[Request, int, float]] = {}
        self.admitted: list[int] = []
        self.widths: list[int] = []

    @property
    def active(self) -> int:
        return len(self.inside)

    def room(self, length: int) -> int:
        return self.max_rows - self.active

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        assert len(requests) <= self.room(1)
        for number, request in enumerate(requests):
            queued = queued_at_s[number] if queued_at_s else 0.0
            self.inside[request.index] = (request, 0, queued)
            self.admitted.append(len(request.canvas))

    def step(self) -> list[Outcome]:
        if self.trouble is not None:
            self.trouble([request for request, _, _ in self.inside.values()])
        self.widths.append(self.active)
        self.stats.steps += 1
        self.stats.slot_steps += self.max_rows
        self.stats.active_slot_steps += self.active
        done = []
        for index, (request, steps, queued) in list(self.inside.items()):
            self.inside[index] = (request, steps + 1, queued)
            if steps + 1 >= (request.canvas == HOLE).sum():
                del self.inside[index]
                done.append(outcome(request, time.perf_counter() - queued))
        return done

    def clear(self) -> list[int]:
        dropped = list(self.inside)
        self.inside.clear()
        return dropped


def outcome(request: Request, wait_s: float) -> Outcome:
    holes = np.flatnonzero(request.canvas == HOLE).astype(np.int32)
    return Outcome(
        index=request.index,
        tokens=holes,
        finish="filled",
        logprob=-1.0,
        nfe=len(holes),
        nfe_draft=0,
        iterations=len(holes),
        proposed=0,
        accepted=0,
        accept_hist=[0, len(holes)],
        wait_s=wait_s,
        prefill_s=0.0,
        decode_s=0.0,
        total_s=wait_s,
        device_s=0.0,
        batch_rows=1.0,
        pad_fraction=0.0,
        started_at_s=0.0,
    )


class FakeClerk:
    """Units made of given canvas lengths (all holes); keeps what it was asked to close."""

    def __init__(self, lengths: dict[int, list[int]]) -> None:
        self.lengths = lengths
        self.opened: list[int] = []
        self.closed: dict[int, list[Sample]] = {}
        self.on_open: Callable[[WorkUnit], None] = lambda unit: None
        self.on_close: Callable[[WorkUnit], None] = lambda unit: None

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        self.on_open(unit)
        self.opened.append(unit.unit)
        return [self.sample(unit, index) for index in range(unit.start, unit.stop)]

    def sample(self, unit: WorkUnit, index: int) -> Sample:
        length = self.lengths[unit.unit][index]
        if length < 0:
            return Sample(index, error=RowError("bad_row", "read", "not a row"))
        return Sample(index, key=index, canvas=np.full(length, HOLE, dtype=np.int32))

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        self.on_close(unit)
        self.closed[unit.unit] = samples
        return Receipt(unit.lease, unit.unit, "w", "n", None, tally_of(samples))


def work(unit: int, rows: int, *, lease: int | None = None, verdicts: tuple[QuarantinedRows, ...] = ()) -> WorkUnit:
    return WorkUnit(
        lease=unit if lease is None else lease,
        unit=unit,
        rows=rows,
        tokens=rows,
        attempt=1,
        pass_=1,
        start=0,
        stop=rows,
        verdicts=verdicts,
    )


class FakeWorker(Turns):
    """A worker without a model for the pool: unit 99 ends its process, LOSES_DEVICE its device, ENDLESS does not end.

    The name `w9` can't be built.
    """

    def __init__(self, name: str, job: object, threads: int) -> None:
        self.begin(name, job, threads)

    def _build(self, job: object, *, name: str, **facts) -> UnitRunner:
        if name == "w9":
            raise ValueError("the model is not there")
        unit_io = FakeClerk({unit: [2, 1] for unit in range(100)} | {ENDLESS: [10**6], LOSES_DEVICE: [LOSES_DEVICE]})
        unit_io.on_open = lambda unit: os._exit(7) if unit.unit == 99 else None
        return UnitRunner(FakeDecoder(trouble=lose_device), unit_io, worker=name)


def lose_device(requests: list[Request]) -> None:
    if any(len(request.canvas) == LOSES_DEVICE for request in requests):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def answers_of(measuring: Measuring) -> list:
    """What a meter gives for the rows, after all of its steps."""
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            return list(end.value)


def run_all(runner: UnitRunner) -> list[Receipt | Failure]:
    news: list[Receipt | Failure] = []
    while runner.held:
        news += runner.step()
    return news
