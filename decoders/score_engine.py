"""The engine of estimated scores (estimates.py): the canvases of several texts in each forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Answer
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.scheduler import Turn
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.estimates import Text


class ScoreEngine(Engine):
    """Runs texts whose canvases each need one forward and keep nothing of it.

    Each forward takes the next canvases in the order in which their texts came, as many as fit: no text waits for another. Every
    canvas has a slot of the cache for the time of a forward. Another text enters while the next forward has room for its
    canvases. An evaluation is a canvas: a text with three of them in a forward is charged three times.
    """

    def __init__(self, setup: Setup, algorithm: Algorithm) -> None:
        super().__init__(setup, algorithm)
        self._memory_bound: int | None = None  # the most canvases that may run at once since memory ran out

    @property
    def texts(self) -> list[Text]:
        """The texts inside, in the order in which they came."""
        texts = [sample for sample in self.samples if isinstance(sample, Text)]
        return sorted(texts, key=lambda text: text.times.admitted_s)

    def room(self, length: int) -> int:
        if not self.active:
            return 1
        pending = sum(text.left for text in self.texts)
        return int(pending < self._most_canvases(length) and self.active < self.max_rows)

    def _most_canvases(self, length: int) -> int:
        """The most canvases that may run at once beside one of this length; at least 1."""
        most = max(self._capacity.most_rows(self._capacity.columns(self._longest_with(length))), 1)
        return most if self._memory_bound is None else min(most, self._memory_bound)

    def _turn(self) -> Turn:
        """The texts that run some of their canvases now."""
        left, taking = self._most_canvases(1), list[Sample]()
        self._shape = self._shape._replace(possible=left)
        for text in self.texts:
            if count := min(text.left, left):
                text.run(count)
                taking.append(text)
                left -= count
        return Turn(taking)

    def _resume(self, samples: Sequence[Sample], replies: Iterable[Answer]) -> list[Sample]:
        ended = list[Sample]()
        for text, answer in zip(samples, replies, strict=True):
            assert isinstance(text, Text), "samples of this engine"
            if not text.is_bad:
                text.read(answer)
            if text.is_bad or not text.left:
                text.decoding = None
                ended.append(text)
        return ended

    def _evaluate(self, turn: Turn) -> list[Sample]:
        """Run the canvases; where they do not fit into memory none is run, and from here on no more than half as many are."""
        num_canvases = sum(text.canvases for text in turn.samples)
        try:
            possible = self._shape.possible
            self._make_room(num_canvases, 1)
            self._shape = self._shape._replace(possible=possible)
            return super()._evaluate(turn)
        except (MemoryError, torch.OutOfMemoryError):
            if num_canvases == 1:
                raise
            self._memory_bound = num_canvases // 2
            return []
