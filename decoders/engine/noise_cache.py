"""The noise of sampled rows on a CPU, where it costs as much as a small model's forward: each number is computed once.

A position keeps its noise until its token is decided: drafts are drawn by it, then the target's own token. GPUs keep nothing:
kernels compute noise as they draw.

    cell      0   1   2   3   4   5        six cells a slot: rank r is kept in cell r % 6, until another rank needs the cell
    rank      6   7   2   3   4   5

Legend: R sampled rows, N ranks to compute, V vocabulary, S slots, W ranks of a slot, C cells.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.draws import noise
from draftmill.decoders.engine.asks import Ints
from draftmill.decoders.engine.batch import Draws
from draftmill.decoders.engine.samples import SlotTable

_AT_ONCE: Final = 1 << 16
"""How many noise values to compute at once: for a few values the overhead dominates."""
_MOST_AHEAD: Final = 15
_COLUMN_STEP: Final = 64


class NoiseCache:
    """Keeps `window` ranks of each slot and, where the vocabulary is small, some after them. Without a window whole canvases
    are kept. With `fresh` each draw has noise of its own, and nothing is kept. The host knows what each cell holds."""

    def __init__(self, slots: SlotTable, vocab_size: int, window: int | None, *, fresh: bool) -> None:
        self._slots, self._vocab_size, self._fresh = slots, vocab_size, fresh
        self._ahead = 0 if window is None else min(_MOST_AHEAD, _AT_ONCE // vocab_size)
        self._window, self._num_cells = window, 0 if window is None else window + self._ahead
        self._held_SC: Ints = np.full((0, self._num_cells), -1)  # the rank that each cell holds; -1: none
        self._noise_CV = torch.zeros(0, vocab_size)

    def resize(self, num_slots: int, most_bytes: int) -> None:
        """Keep noise for `num_slots` slots, as far as it fits; kept noise stays. Cells are allocated at a row's first need."""
        most = most_bytes // max(1, 4 * self._num_cells * self._vocab_size) if self._num_cells else num_slots
        held_SC, count = self._held_SC, min(num_slots, most)
        self._held_SC = np.full((count, self._num_cells), -1)
        if len(self._noise_CV):
            both = min(count, len(held_SC))
            self._held_SC[:both] = held_SC[:both]
            self._allocate(both * self._num_cells)

    def _allocate(self, num_kept: int) -> None:
        kept_CV = self._noise_CV[:num_kept]
        self._noise_CV = torch.zeros(self._held_SC.size, self._vocab_size)
        self._noise_CV[: len(kept_CV)] = kept_CV

    def start(self, slot: int) -> None:
        self._held_SC[slot : slot + 1] = -1

    def rows(self, draws: Draws[Any], part: slice, most_bytes: int, ahead: int) -> Tensor:
        """The noise of some sampled rows, `ahead` draws after the next, [R, V]."""
        slot_R, rank_R = draws.slot_R[part], draws.rank_R[part]
        if self._fresh or draws.once:
            return self._compute(
                slot_R, rank_R, draws.host_draw_R[part] + ahead if self._fresh else np.zeros_like(rank_R)
            )
        if self._window is None:
            self._fit_canvases(int(rank_R.max(initial=0)) + 1, most_bytes)
        near_R = slot_R < len(self._held_SC) if self._num_cells else np.zeros(len(slot_R), dtype=np.bool_)
        if near_R.all():
            return self._read(slot_R, rank_R)
        noise_RV = torch.empty(len(slot_R), self._vocab_size)
        noise_RV[near_R] = self._read(slot_R[near_R], rank_R[near_R])
        noise_RV[~near_R] = self._compute(slot_R[~near_R], rank_R[~near_R], np.zeros(int((~near_R).sum()), np.int64))
        return noise_RV

    def _fit_canvases(self, length: int, most_bytes: int) -> None:
        if length <= self._num_cells:
            return
        count = len(self._held_SC)
        self._num_cells = rounded(length, _COLUMN_STEP)
        if count * self._num_cells * self._vocab_size * 4 > most_bytes:
            self._num_cells = 0
        self._held_SC = np.full((count, self._num_cells), -1)
        self._noise_CV = torch.zeros(0, self._vocab_size)

    def _read(self, slot_R: Ints, rank_R: Ints) -> Tensor:
        if len(self._noise_CV) < self._held_SC.size:
            self._allocate(0)
        missing_R = self._held_SC[slot_R, rank_R % self._num_cells] != rank_R
        if missing_R.any():
            self._fill(slot_R[missing_R], rank_R[missing_R])
        noise_RV = self._noise_CV.index_select(0, torch.from_numpy(slot_R * self._num_cells + rank_R % self._num_cells))
        lost_R = self._held_SC[slot_R, rank_R % self._num_cells] != rank_R
        if lost_R.any():  # ranks of one forward that share a cell: rows of a probe, or a window that is too small
            none_L = np.zeros(int(lost_R.sum()), np.int64)
            noise_RV[torch.from_numpy(lost_R)] = self._compute(slot_R[lost_R], rank_R[lost_R], none_L)
        return noise_RV

    def _fill(self, slot_N: Ints, rank_N: Ints) -> None:
        """Compute what is missing; where this is cheap also the ranks after the last one of each slot."""
        more = min(self._ahead, _AT_ONCE // (len(slot_N) * self._vocab_size) - 1)
        if more > 0:
            most_S = np.full(len(self._held_SC), -1)
            np.maximum.at(most_S, slot_N, rank_N)
            slots = np.flatnonzero(most_S >= 0)
            further_N = (most_S[slots, None] + np.arange(1, more + 1)).reshape(-1)
            others_N = np.repeat(slots, more)
            inside_N = further_N < self._slots.length_S[others_N]
            slot_N, rank_N = np.append(slot_N, others_N[inside_N]), np.append(rank_N, further_N[inside_N])
        cell_N, first_N = np.unique(slot_N * self._num_cells + rank_N % self._num_cells, return_index=True)
        slot_N, rank_N = slot_N[first_N], rank_N[first_N]
        self._noise_CV[torch.from_numpy(cell_N)] = self._gumbel(slot_N, rank_N, np.zeros_like(rank_N))
        self._held_SC[slot_N, rank_N % self._num_cells] = rank_N

    def _compute(self, slot_R: Ints, rank_R: Ints, draw_R: Ints) -> Tensor:
        """Noise that is not kept: that of each different (slot, rank, draw) is computed once."""
        width, most = int(rank_R.max(initial=0)) + 1, int(draw_R.max(initial=0)) + 1
        number_R = (slot_R * width + rank_R) * most + draw_R
        _, first_N, which_R = np.unique(number_R, return_index=True, return_inverse=True)
        noise_NV = self._gumbel(slot_R[first_N], rank_R[first_N], draw_R[first_N])
        return noise_NV if len(first_N) == 1 == len(which_R) else noise_NV[torch.from_numpy(which_R.reshape(-1))]

    def _gumbel(self, slot_N: Ints, rank_N: Ints, draw_N: Ints) -> Tensor:
        order_SW = self._slots.order_SW
        place_N = rank_N if order_SW is None else order_SW[slot_N, rank_N]
        keys_N2 = torch.from_numpy(self._slots.key_S2[slot_N])
        return noise.gumbel_rows(keys_N2, torch.from_numpy(place_N), self._vocab_size, draws_R=torch.from_numpy(draw_N))
