"""Runs estimated scores (estimates.py): texts whose canvases each need one forward and keep nothing of it.

Each forward takes the next canvases in the order in which their texts came, as many as fit. So no text waits for another, and
every canvas has a slot of the cache for the time of a forward. Another text comes in while the next forward has room for its
canvases. An evaluation is a canvas: a text with three of them in a forward is charged three times.

Legend: N canvases of a forward, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import WIDE, GivenRows, Offer, Score
from draftmill.decoders.engine.engine import Engine, Turn
from draftmill.decoders.engine.estimates import Text
from draftmill.decoders.engine.lanes import Lane, Packed
from draftmill.decoders.engine.packing import Table
from draftmill.decoders.engine.parcels import Parcel
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.scores import Scores
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.token_lanes import TokenLane

Told = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Of each token of a canvas that is read: its log-probability, and whether it is the model's first choice."""


class ScoreLane(TokenLane):
    """A model that runs canvases from their first row to their last, and keeps nothing."""

    @property
    def can_capture(self) -> bool:
        """See Lane. Whole texts run, which keep a device busy."""
        return False

    @property
    def cell_bytes(self) -> int:
        """See Lane; with the activations of a row, its token and its position."""
        return super().cell_bytes + int(getattr(self.backbone, "row_bytes", 0)) + 16

    def start(self, sample: Sample) -> None:
        """Nothing is kept between forwards."""


class ScoreEngine(Engine):
    """See the module's docstring."""

    def __init__(self, setup: Setup, algorithm: Algorithm) -> None:
        super().__init__(setup, algorithm)
        self._scores = Scores(setup, lambda: self.account)
        self._laps = list[float]()  # the seconds of the last forward's parts
        self._memory_bound: int | None = None  # how many canvases may run at once since memory ran out

    def _target(self, setup: Setup) -> Lane:
        return ScoreLane(setup.backbone, setup.info.vocab_size, is_target=True)

    @property
    def texts(self) -> list[Text]:
        """The texts inside, in the order in which they came."""
        texts = [sample for sample in self.samples if isinstance(sample, Text)]
        return sorted(texts, key=lambda text: text.times.admitted_s)

    # ---- admission -----------------------------------------------------------------------------------------------

    def room(self, length: int) -> int:
        """One more text while the next forward has room for its canvases."""
        if not self.active:
            return 1
        pending = sum(text.left for text in self.texts)
        return int(pending < self._most_canvases(length) and self.active < self.max_rows)

    def _most_canvases(self, length: int) -> int:
        """How many canvases may run at once beside one of this length; at least one."""
        most = max(self._space.most_rows(self._space.columns(self._longest_with(length))), 1)
        return most if self._memory_bound is None else min(most, self._memory_bound)

    # ---- one forward ---------------------------------------------------------------------------------------------

    def _turn(self) -> Turn:
        """The texts that run some of their canvases now."""
        left, taking = self._most_canvases(1), list[Sample]()
        self._space.num_lanes = left
        for text in self.texts:
            assert text.decoding is not None, "a text in a slot has a generator"
            offer = text.ask or next(text.decoding)
            assert isinstance(offer, Offer), "a text offers its canvases before each forward"
            text.ask, count = offer, min(offer.most, left)
            if count:
                text.ask, left = text.decoding.send(count), left - count
                taking.append(text)
        return Turn(taking, fresh=False, joined=False)

    def _evaluate(self, samples: list[Sample], *, is_new: bool) -> list[Sample]:
        """Run the canvases; where they do not fit into memory none is run, and from here on no more than half as many are."""
        asked = [sample.ask.canvases for sample in samples if isinstance(sample.ask, Score)]
        assert len(asked) == len(samples), "texts ask for scores"
        canvases = [canvas for each in asked for canvas in each]
        try:
            self._make_room(len(canvases), 1)
            told = self._read(canvases)
        except (MemoryError, torch.OutOfMemoryError):
            if len(canvases) == 1:
                raise
            self._memory_bound = len(canvases) // 2
            return self._resume(samples, iter([None] * len(samples)))
        self._charge(samples, [len(each) for each in asked])
        return self._resume(samples, iter([[next(told) for _ in each] for each in asked]))

    def _read(self, canvases: Sequence[GivenRows]) -> Iterator[Told]:
        """Run each canvas in a slot of its own; what it says of its tokens."""
        lane, every_N = self.lanes[0], np.arange(len(canvases))
        owner_P = np.repeat(every_N, [len(canvas.spans) // WIDE for canvas in canvases])
        spans = [number for canvas in canvases for number in canvas.spans]
        table, sizes = Table(spans, owner_P, len(canvases), fields=WIDE), [len(canvas.rows) for canvas in canvases]
        place_R = table.places(np.repeat(every_N, sizes), np.concatenate([canvas.rows for canvas in canvases]))
        shares = [canvas.share for canvas in canvases if canvas.share is not None]
        share_N = np.array(shares) if shares else None
        tokens = np.concatenate([canvas.tokens for canvas in canvases])
        parcel = Parcel()
        reading = self._scores.plan(lane, np.concatenate([canvas.wanted for canvas in canvases]), parcel)
        run = lane.plan(Packed(every_N, tokens, table, None, 0, place_R, share_N), reading, parcel)
        started = lane.start_run(run, reading, parcel)
        log_p_R, is_first_R = next(lane.finish(started))
        self._laps = lane.seconds(started)
        ends = np.cumsum(sizes)[:-1]
        return zip(np.split(log_p_R, ends), np.split(is_first_R, ends), strict=True)

    def _charge(self, samples: list[Sample], counts: list[int]) -> None:
        """Charge each text for its canvases."""
        lane, slot_B = self.lanes[0], np.array([sample.slot for sample in samples])
        laps = self._laps
        self.counters.ran(
            slot_B, useful=lane.useful, computed=lane.computed, seconds=sum(laps), forwards_B=np.array(counts)
        )
        self.counters.first([sample.slot for sample in samples if not sample.nfe], laps[0])
        for sample, count in zip(samples, counts, strict=True):
            sample.nfe += count
