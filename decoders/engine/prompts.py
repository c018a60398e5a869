"""The samples whose prompts have not run: what they take over from others, who waits for whom, and who runs in the next forward.

A sample waits for another one's prompt if both have more in common than any slot holds yet: the samples of a row (`sampling.n`)
have one prompt, those of a task the same examples before their questions. It takes that over as soon as the columns are there.

    A  shots | question A     runs, a piece in each forward where the rows are many (pieces.py)
    B  shots | question B     waits until A's columns of the shots are in place; copies them, and runs the rest
    C  other                  runs beside A, as far as the budget of rows allows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from draftmill.decoders.base import EngineStats
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.lanes import Lane
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.prefixes import Prefixes
from draftmill.decoders.engine.samples import Sample

LEAST_SHARED: Final = 16
"""A sample waits for another one's prompt, and columns are copied, if that saves so many rows, or all that can be saved."""


@dataclass(slots=True, eq=False)
class Newcomer:
    """A sample whose prompt has not run, or not all of it. It waits until `source` has this many `columns` of its own prompt."""

    sample: Sample
    begun: bool = False
    settled: bool = False
    source: Newcomer | None = None
    columns: int = 0
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether what it waits for is not there yet."""
        source = self.source
        return source is not None and not source.done and source.sample.cached < self.columns


class Prompts:
    """The newcomers, in the order in which they came. `lane` runs the model whose columns they take over."""

    def __init__(
        self, algorithm: Callable[[], Algorithm], prefixes: Prefixes, lane: Lane, vocab_size: int, stats: EngineStats
    ) -> None:
        self._algorithm, self._prefixes, self._lane = algorithm, prefixes, lane
        self._vocab_size, self._stats = vocab_size, stats
        self._line: list[Newcomer] = []

    def __len__(self) -> int:
        return len(self._line)

    @property
    def samples(self) -> list[Sample]:
        """All of them."""
        return [one.sample for one in self._line]

    def came(self, sample: Sample) -> None:
        """A sample with a prompt has its slot; what the last one left there of this prompt is taken over."""
        self._line.append(Newcomer(sample))
        most = self._algorithm().shared(sample)
        if not (most and self._lane.is_sound(sample.slot)):
            self._prefixes.forget(sample.slot)
        if most:
            sample.cached = self._prefixes.place(sample.slot, prompt_of(sample, self._vocab_size), most)

    def clear(self) -> None:
        """Nobody is left."""
        self._line.clear()

    # ---- before a forward ----------------------------------------------------------------------------------------

    def ready(self) -> list[Sample]:
        """Those that wait for no other one's prompt; columns that others hold are copied into their slots."""
        coming = list[Newcomer]()
        for one in self._line:
            if not one.settled or (one.source is not None and not one.waits):
                self._settle(one, coming)
            if not one.waits:
                coming.append(one)
        return [one.sample for one in coming]

    def _settle(self, one: Newcomer, coming: list[Newcomer]) -> None:
        """Take over what is there, and find out whether it is worth waiting for one of those that run before."""
        one.settled, one.source = True, None
        sample, most = one.sample, self._algorithm().shared(one.sample)
        if not most:
            return
        self._take_over(sample, most)
        found = self._prefixes.awaited(sample.slot, most, [other.sample.slot for other in coming])
        if is_worth(found.columns - sample.cached, found.columns == most):
            one.source = next(other for other in coming if other.sample.slot == found.slot)
            one.columns = found.columns

    def _take_over(self, sample: Sample, most: int) -> None:
        """Copy what another slot holds of a new sample's prompt. Nothing comes from a slot that holds NaN or infinity."""
        lane = self._lane
        while (found := self._prefixes.held(sample.slot, most)).columns and not lane.is_sound(found.slot):
            self._prefixes.forget(found.slot)
        if is_worth(found.columns - sample.cached, found.columns == most):
            lane.copy_prefix(found.slot, sample.slot, found.columns)
            sample.cached = found.columns
            self._prefixes.ran(sample.slot, found.columns)

    def begin(self, running: Sequence[Sample]) -> None:
        """These samples run rows of their prompts now; each prompt is counted when it begins."""
        slots = {sample.slot for sample in running}
        for one in self._line:
            if one.sample.slot in slots and not one.begun:
                one.begun = True
                if most := self._algorithm().shared(one.sample):
                    self._stats.prompt_rows += self._columns(one.sample, most)
                    self._stats.prompt_rows_shared += one.sample.cached

    # ---- after it ------------------------------------------------------------------------------------------------

    def ran(self, new: Sequence[Sample], pieces: Sequence[Sample]) -> None:
        """The prompts of `new` samples are in place; those who wait take them over before a slot has its next sample."""
        for sample in pieces:
            self._prefixes.ran(sample.slot, sample.cached)
        slots = {sample.slot for sample in new}
        for one in self._line:
            if one.sample.slot in slots:
                one.done = True
                if most := self._algorithm().shared(one.sample):
                    self._prefixes.ran(one.sample.slot, self._columns(one.sample, most))
        if new:
            self._line = [one for one in self._line if not one.done]
            for one in self._line:
                if one.source is not None and one.source.done:
                    self._take_over(one.sample, self._algorithm().shared(one.sample))

    @staticmethod
    def _columns(sample: Sample, most: int) -> int:
        """How many columns of a prompt its sample's first ask leaves in the cache."""
        return min(most + 1, sample.prompt)


def is_worth(saved: int, is_all: bool) -> bool:
    """Whether so many rows are worth a copy of columns, or a step of waiting."""
    return saved >= LEAST_SHARED or (saved > 0 and is_all)


def prompt_of(sample: Sample, vocab_size: int) -> Ints:
    """What the columns of a prompt depend on: its tokens, and their positions where columns are not positions."""
    tokens = np.array(sample.tokens[: sample.prompt], dtype=np.int64)
    return tokens if sample.order is None else tokens + vocab_size * np.array(sample.order[: sample.prompt])
