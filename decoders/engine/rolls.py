"""Drafts a window from rows of the last forward, rank after rank, with a draft head that reads the tokens drafted before.

The host knows of each rank which tokens the head reads, except those that the window itself drafts. It refers to these by number,
so that no drafted token leaves the device before the window is complete:

    rank          ..  n-1 | n    n+1  n+2           three drafts after n decided tokens
    read before   ..      | 17   -2   -3            an id, or -2 - j: the window's own draft j

Legend: B samples that roll, those with the longest windows first; K ranks of the longest, F numbers that a head reads of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.backbones.head_files import MAX_DISTANCE
from draftmill.decoders.backbones.heads import DraftHeads
from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.engine.asks import Answer, Roll
from draftmill.decoders.engine.lanes import Lane
from draftmill.decoders.engine.packing import Asked, Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.samples import Sample

Draft = Callable[[Sent, Tensor], Tensor]
"""(sent, logits [R, V]) -> drafts [R]."""


class Rolling:
    """The windows of one step that a head rolls over.

    `row_B` are the places of their first rows, `told_BKF` what the head reads.
    """

    def __init__(self, samples: list[Sample], asks: list[Roll], row_B: Ints) -> None:
        order = sorted(range(len(samples)), key=lambda index: -asks[index].num_drafts)
        self.samples, self.asks = [samples[index] for index in order], [asks[index] for index in order]
        self.row_B: Ints = row_B[order]
        self.slot_B: Ints = np.array([sample.slot for sample in self.samples], dtype=np.int64)
        self.rank_B: Ints = np.array([ask.rank for ask in self.asks], dtype=np.int64)
        self.when_B: Ints = np.array([sample.decided for sample in self.samples], dtype=np.int64)
        self.counts = [ask.num_drafts for ask in self.asks]
        found = [_read(sample, ask) for sample, ask in zip(self.samples, self.asks, strict=True)]
        most = self.counts[0] * len(found[0][0])
        flat = [[number for rank in ranks for number in rank] for ranks in found]
        told = np.array([numbers + [0] * (most - len(numbers)) for numbers in flat], dtype=np.int64)
        self.told_BKF: Ints = told.reshape(len(flat), self.counts[0], -1)

    def plan(
        self,
        lane: Lane,
        heads: DraftHeads,
        draft: Callable[[Asked, Parcel], Draft],
        parcel: Parcel,
        *,
        size: int | None = None,
    ) -> Callable[[Sent, Tensor], Tensor]:
        """Plan to draft all windows from the last forward's hidden states: drafts [B, K], which beyond a window mean nothing.

        `draft` plans the draws of one rank. With `size`, there are so many windows, all as long as the longest: then the work
        depends on nothing but K, and `draft` fills its rows up to that size.
        """
        told_KFB = self.told_BKF.transpose(1, 2, 0)
        told, rows = parcel.enclose(told_KFB, size=size), parcel.enclose(self.row_B, size=size)
        # The samples that still draft come first.
        ranks = range(self.counts[0])
        going = [len(self.counts) if size else sum(count > rank for count in self.counts) for rank in ranks]
        draws = [draft(self._asked(count, offset), parcel) for offset, count in enumerate(going)]
        if size is not None:
            going = [size] * len(going)

        def work(sent: Sent, hidden_ND: Tensor) -> Tensor:
            told_BKF, row_B = sent[told].permute(2, 0, 1), sent[rows]
            drafted_BK = torch.zeros(told_BKF.shape[:2], dtype=torch.int64, device=lane.device)
            step = _Corrected(lane, heads, hidden_ND, row_B, exceeds=size is not None)
            for offset, (count, draw) in enumerate(zip(going, draws, strict=True)):
                hidden_RD = step(told_BKF[:count, offset], drafted_BK[:count], offset)
                drafted_BK[:count, offset] = draw(sent, lane.logits(hidden_RD))
            return drafted_BK.to(torch.float64)

        return work

    def _asked(self, count: int, offset: int) -> Asked:
        last_B = self.rank_B + np.array(self.counts) - 1  # what is drawn beyond a window is its last rank once more
        rank_B = np.minimum(self.rank_B + offset, last_B)
        return Asked.drafting(self.slot_B[:count], rank_B[:count], self.when_B[:count])

    def drafts(self, told: NDArray[np.float64]) -> Iterator[Answer]:
        """Each sample's drafts, from a record of any shape."""
        most = self.counts[0]
        tokens = told.reshape(-1, most)[: len(self.counts)].astype(np.int64).tolist()
        return (Answer(0, own[:count], [0.0] * count) for own, count in zip(tokens, self.counts, strict=True))


# ---- on the device -----------------------------------------------------------------------------------------------


def _embedded(lane: Lane, read_R: Tensor, drafted_RK: Tensor) -> Tensor:
    """The embeddings of tokens that are ids or references to drafts."""
    own_R = drafted_RK.gather(1, (-2 - read_R).clamp(min=0).unsqueeze(1)).squeeze(1)
    return lane.embed(torch.where(read_R <= -2, own_R, read_R).clamp(min=0))


class _Corrected:
    """Each rank has a row of its own, which the head corrects with the two tokens before it."""

    def __init__(self, lane: Lane, heads: DraftHeads, hidden_ND: Tensor, row_B: Tensor, *, exceeds: bool) -> None:
        self._lane, self._head, self._hidden_ND, self._row_B = lane, heads.markov, hidden_ND, row_B
        self._exceeds = exceeds  # windows are drafted beyond their ends, where there may be no row

    def __call__(self, told_RF: Tensor, drafted_RK: Tensor, offset: int) -> Tensor:
        lane, (prev_R, prev_distance_R, before_R, before_distance_R, num_unseen_R) = self._lane, told_RF.unbind(1)
        row_R = self._row_B[: len(told_RF)] + offset
        if self._exceeds:
            row_R = row_R.clamp(max=len(self._hidden_ND) - 1)
        hidden_RD = self._hidden_ND.index_select(0, row_R)
        others = {
            "prev_RD": _embedded(lane, prev_R, drafted_RK),
            "prev_distance_R": prev_distance_R,
            "before_RD": _embedded(lane, before_R, drafted_RK),
            "before_distance_R": before_distance_R,
            "num_unseen_R": num_unseen_R,
        }
        return lane.clock.timed(lambda: at_least_rows(lane.backbone.min_rows, self._head, hidden_RD, **others))


# ---- on the host: what the head reads -----------------------------------------------------------------------------


def _token(sample: Sample, first: int, rank: int) -> int:
    """The token at a rank, or the reference to the draft that will stand there."""
    return sample.tokens[rank] if rank < first else first - rank - 2


def _distance(sample: Sample, rank: int, other: int) -> int:
    """The index of the clipped signed distance between the positions of two ranks (heads.distance_index)."""
    order = sample.order
    away = rank - other if order is None else order[rank] - order[other]
    return max(-MAX_DISTANCE, min(MAX_DISTANCE, away)) + MAX_DISTANCE


def _read(sample: Sample, ask: Roll) -> list[tuple[int, ...]]:
    """Of each rank: the token before it and how far that is, the one before that, and how many the row has not seen."""
    found: list[tuple[int, ...]] = []
    for rank in range(ask.rank, ask.rank + ask.num_drafts):
        prev, before = max(rank - 1, 0), max(rank - 2, 0)
        read: tuple[int, ...] = (_token(sample, ask.rank, prev), _distance(sample, rank, prev))
        read += (_token(sample, ask.rank, before), _distance(sample, rank, before))
        found.append((*read, rank - ask.limit))
    return found
