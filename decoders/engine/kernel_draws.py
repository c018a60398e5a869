"""Draws and judges by one kernel on a GPU (decoders/kernels/choice.py), in place of the operations of RowLaws and NoiseRing.

The kernel computes the noise again wherever it is read, so that none is kept. Settings and keys go down with the forward's rows,
which is all that the kernel has to be told.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.engine.asks import NO_DRAFT
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.rings import Places
from draftmill.decoders.engine.row_laws import RowLaws
from draftmill.decoders.engine.transfers import marks
from draftmill.decoders.kernels.find import Choice


class KernelDraws:
    """The kernel with the settings and keys of the slots."""

    def __init__(self, choice: Choice, info: ModelInfo, rows: RowLaws, places: Places, device: torch.device) -> None:
        self._choice, self._rows, self._places, self._device = choice, rows, places, device
        self._suppressed_V = marks(info.suppressed, info.vocab_size, device)

    def plan(
        self, slot_R: Ints, rank_R: Ints, scored_R: Ints | None, parcel: Parcel, *, size: int | None = None
    ) -> Callable[[Sent, Tensor], tuple[Tensor, Tensor]]:
        """Plan the token of each row by its noise (int64), and its log-probability, or that of the token that `scored_R` names.

        The work takes logits. With `size` so many rows are drawn; those beyond ours mean nothing.
        """
        key_2R, position_R = self._places.key_S2[slot_R].T, self._places.positions(slot_R, rank_R)
        keys, positions = (parcel.enclose(numbers, size=size) for numbers in (key_2R, position_R))
        scored = None if scored_R is None else parcel.enclose(scored_R, size=size, fill=NO_DRAFT)
        each, cuts = self._each(slot_R, parcel, size), self._rows.cuts(slot_R)

        def work(sent: Sent, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
            warp = self._rows.warp(sent[each], self._suppressed_V, cuts=cuts)
            scored_R = None if scored is None else sent[scored]
            chosen = self._choice.choose(logits_RV, warp, sent[keys].T, sent[positions], scored_R=scored_R)
            return chosen.token_R, chosen.log_p_R

        return work

    def weighing(self, slot_R: Ints, parcel: Parcel) -> Callable[[Sent, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Plan log p(draft) - log q(draft) of each row, and log p under the model itself, float64 [R]."""
        each, cuts = self._each(slot_R, parcel, None), self._rows.cuts(slot_R)

        def work(sent: Sent, logits_RV: Tensor, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, Tensor]:
            warp = self._rows.warp(sent[each], self._suppressed_V, cuts=cuts)
            return self._choice.weigh(logits_RV, warp, draft_R, log_q_R)

        return work

    def _each(self, slot_R: Ints, parcel: Parcel, size: int | None) -> str:
        return parcel.enclose(self._rows.each(slot_R), size=size, fill=1)
