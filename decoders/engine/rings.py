"""Rings over the next ranks of every slot, on the device: target noise that is kept, and the distributions of drafts.

A ring of n cells holds rank r of a slot in cell r % n. What a cell holds is known on the host, so that nothing is asked of the
device. Ranks below those that a sample has decided are never read again.

Legend: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.engine.packing import Ints, repeated
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.samples import Sample

Found = Callable[[Sent], Tensor]
"""Work on the device that gives noise, [R, V]."""

_AHEAD: Final = 1 << 16
"""How many noise values to compute at once: for a few values the overhead dominates."""


class Places:
    """The key and the position of every rank of every slot, on the host."""

    def __init__(self, num_slots: int) -> None:
        self.key_S2: Ints = np.zeros((num_slots, 2), dtype=np.int64)
        self.length_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self._order_SW: Ints | None = None

    def start(self, sample: Sample) -> None:
        """Note a new sample's."""
        slot = sample.slot
        self.key_S2[slot], self.length_S[slot] = split_key(sample.key), sample.length
        if sample.order is None:
            return
        width = 0 if self._order_SW is None else self._order_SW.shape[1]
        if sample.length > width:
            wider = np.zeros((len(self.length_S), sample.length), dtype=np.int64)
            if self._order_SW is not None:
                wider[:, :width] = self._order_SW
            self._order_SW = wider
        assert self._order_SW is not None, "an order has a place"
        self._order_SW[slot, : sample.length] = sample.order

    def positions(self, slot_R: Ints, rank_R: Ints) -> Ints:
        """The position of each rank, [R]."""
        return rank_R if self._order_SW is None else self._order_SW[slot_R, rank_R]


class Ring:
    """`num_cells` rows of V numbers for each of the first slots, and one that nobody reads.

    It grows and shrinks with the slots in use.
    """

    def __init__(self, num_cells: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_cells, self._vocab_size = num_cells, vocab_size
        self.data_CV = torch.zeros(1, vocab_size, dtype=dtype, device=device)

    @property
    def trash(self) -> int:
        """The row that nobody reads."""
        return len(self.data_CV) - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's cells."""
        return self.num_cells * self._vocab_size * self.data_CV.element_size()

    @property
    def num_slots(self) -> int:
        """How many slots have cells."""
        return self.trash // self.num_cells

    def resized(self, num_slots: int) -> Tensor:
        """The cells for so many slots; what they hold stays."""
        cells = num_slots * self.num_cells + 1
        if cells == len(self.data_CV):
            return self.data_CV
        data_CV = self.data_CV.new_zeros(cells, self._vocab_size)
        both = min(cells, len(self.data_CV))
        data_CV[:both] = self.data_CV[:both]
        return data_CV

    def cells(self, slot_R: Ints, rank_R: Ints) -> Ints:
        """The rows of `data_CV` that hold these ranks, [R]."""
        return slot_R * self.num_cells + rank_R % self.num_cells


def passing(places: Places, vocab_size: int, slot_R: Ints, rank_R: Ints, step_R: Ints, parcel: Parcel) -> Found:
    """Plan noise that is not kept, [R, V]: that of each different (slot, rank, step) is computed once."""
    each_N, which_R = np.unique(np.stack([slot_R, rank_R, step_R]), axis=1, return_inverse=True)
    computed, which = computed_noise(places, vocab_size, *each_N, parcel=parcel), parcel.enclose(which_R.reshape(-1))
    return lambda sent: computed(sent)[sent[which]]


def computed_noise(
    places: Places, vocab_size: int, slot_N: Ints, rank_N: Ints, step_N: Ints | None = None, *, parcel: Parcel
) -> Found:
    """Plan the noise of these ranks (and steps), [N, V]."""
    keys = parcel.enclose(places.key_S2[slot_N])
    positions = parcel.enclose(places.positions(slot_N, rank_N))
    steps = None if step_N is None else parcel.enclose(step_N)
    return lambda sent: noise.gumbel_rows(
        sent[keys], sent[positions], vocab_size, draws_R=None if steps is None else sent[steps]
    )


class NoiseRing:
    """Target noise of the next ranks of every slot, each rank computed once however often it is read.

    `window` is the number of ranks of a slot that may be read at one time. Where few ranks are wanted and the vocabulary is
    small, more of them are computed along. The first slots have a ring, as many as `most_bytes` allow; for the others the noise
    of each rank is computed once a call.
    """

    def __init__(self, places: Places, *, window: int, vocab_size: int, device: torch.device) -> None:
        self._places, self._vocab_size, self._device = places, vocab_size, device
        self._ahead = min(15, _AHEAD // vocab_size)
        self.ring = Ring(window + self._ahead, vocab_size, torch.float32, device)
        self.window, self.num_used = window, 0
        # The ring holds the ranks below this one, from the sample's decided ones on; when the plans of one parcel are worked off,
        # those below the other. A forward that fails leaves only the former.
        self._until_S: Ints = np.zeros(len(places.length_S), dtype=np.int64)
        self._planned_S, self._parcel = self._until_S.copy(), Parcel()

    def start(self, sample: Sample) -> None:
        """A new sample's cells are empty."""
        self._until_S[sample.slot] = self._planned_S[sample.slot] = sample.prompt

    def use(self, num_slots: int, most_bytes: int) -> tuple[int, Tensor]:
        """The cells for so many slots, as far as they fit; `take` makes them the ring's."""
        return num_slots, self.ring.resized(min(num_slots, most_bytes // max(1, self.ring.slot_bytes)))

    def take(self, used: tuple[int, Tensor]) -> None:
        """Take the cells from `use`; slots that lost theirs hold nothing."""
        self.num_used, self.ring.data_CV = used
        self._until_S[self.ring.num_slots :] = 0

    def plan(self, slot_R: Ints, rank_R: Ints, first_R: Ints | None, parcel: Parcel) -> Found:
        """The noise at each (slot, rank), [R, V]; `first_R` is the first rank of the slot that may still be read.

        Without it the noise is read once: nothing is kept. A plan is worked off before the next sample starts.
        """
        if first_R is None:
            return self._passing(slot_R, rank_R, parcel)
        num_kept = self.ring.num_slots
        if num_kept >= self.num_used:
            return self._kept(slot_R, rank_R, first_R, parcel)
        near_R = slot_R < num_kept
        near, far = (parcel.enclose(np.flatnonzero(part)) for part in (near_R, ~near_R))
        kept = self._kept(slot_R[near_R], rank_R[near_R], first_R[near_R], parcel)
        passing = self._passing(slot_R[~near_R], rank_R[~near_R], parcel)

        def found(sent: Sent) -> Tensor:
            noise_RV = torch.empty(len(slot_R), self._vocab_size, dtype=torch.float32, device=self._device)
            noise_RV[sent[near]] = kept(sent)
            noise_RV[sent[far]] = passing(sent)
            return noise_RV

        return found

    def _kept(self, slot_R: Ints, rank_R: Ints, first_R: Ints, parcel: Parcel) -> Found:
        assert (rank_R - first_R < self.window).all(), (
            "a rank beyond the window would overwrite noise that is still read"
        )
        if parcel is not self._parcel:
            self._planned_S, self._parcel = self._until_S.copy(), parcel
        is_missing = (rank_R >= self._planned_S[slot_R]).any()
        fill = self._fill(slot_R, rank_R, first_R, parcel) if is_missing else None
        cells = parcel.enclose(self.ring.cells(slot_R, rank_R))

        def found(sent: Sent) -> Tensor:
            if fill is not None:
                fill(sent)
            return self.ring.data_CV.index_select(0, sent[cells])

        return found

    def _fill(self, slot_R: Ints, rank_R: Ints, first_R: Ints, parcel: Parcel) -> Callable[[Sent], None]:
        """Fill up to the highest rank of each slot; where this is cheap also the ranks after it, for all slots that ask."""
        need_S, from_S = np.zeros_like(self._planned_S), self._planned_S.copy()
        np.maximum.at(need_S, slot_R, rank_R + 1)
        np.maximum.at(from_S, slot_R, first_R)
        more = min(self._ahead, _AHEAD // (len(slot_R) * self._vocab_size) - 1)
        if more > 0:
            further_R = np.minimum(rank_R + 1 + more, self._places.length_S[slot_R])
            np.maximum.at(need_S, slot_R, further_R)
        slots = np.flatnonzero(need_S > from_S)
        count = need_S[slots] - from_S[slots]
        slot_N = np.repeat(slots, count)
        rank_N = np.repeat(from_S[slots], count) + repeated(count.cumsum() - count, count)
        cells = parcel.enclose(self.ring.cells(slot_N, rank_N))
        computed = computed_noise(self._places, self._vocab_size, slot_N, rank_N, parcel=parcel)
        self._planned_S[slots] = need_S[slots]

        def fill(sent: Sent) -> None:
            self.ring.data_CV[sent[cells]] = computed(sent)
            self._until_S[slots] = need_S[slots]

        return fill

    def _passing(self, slot_R: Ints, rank_R: Ints, parcel: Parcel) -> Found:
        return passing(self._places, self._vocab_size, slot_R, rank_R, np.zeros_like(rank_R), parcel)
