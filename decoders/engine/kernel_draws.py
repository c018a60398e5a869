"""Draws and judges by one kernel on a GPU (decoders/kernels/choice.py), in place of the operations of RowLaws and NoiseRing.

The kernel computes the noise again wherever it is read, so that none is kept. Settings and keys go down with each call, which is
all that the kernel has to be told.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decoders.base import ModelInfo
from decoders.engine.packing import Ints
from decoders.engine.rings import Places
from decoders.engine.row_laws import RowLaws
from decoders.engine.transfers import put
from decoders.kernels.find import Choice


class KernelDraws:
    """The kernel with the settings and keys of the slots."""

    def __init__(self, choice: Choice, info: ModelInfo, rows: RowLaws, places: Places, device: torch.device) -> None:
        self._choice, self._rows, self._places, self._device = choice, rows, places, device
        suppressed_V = np.zeros(info.vocab_size, dtype=np.bool_)
        suppressed_V[list(info.suppressed)] = True
        self._suppressed_V = put(suppressed_V, device)

    def draw(self, logits_RV: Tensor, slot_R: Ints, rank_R: Ints, scored_R: Ints | None) -> tuple[Tensor, Tensor]:
        """The token of each row by its noise (int64) and its log-probability, or that of the token that `scored_R` names, [R]."""
        count = len(slot_R)
        named_R = np.full(count, -1) if scored_R is None else scored_R
        key_R2, position_R = self._places.key_S2[slot_R], self._places.positions(slot_R, rank_R)
        told = put(np.concatenate([key_R2.ravel(), position_R, named_R]), self._device)
        chosen = self._choice.choose(
            logits_RV,
            self._rows.warp(slot_R, self._suppressed_V),
            told[: 2 * count].view(count, 2),
            told[2 * count : 3 * count],
            scored_R=told[3 * count :],
        )
        return chosen.token_R, chosen.log_p_R

    def weigh(self, logits_RV: Tensor, slot_R: Ints, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, Tensor]:
        """log p(draft) - log q(draft) of each row, and log p under the model itself, float64 [R]."""
        return self._choice.weigh(logits_RV, self._rows.warp(slot_R, self._suppressed_V), draft_R, log_q_R)
