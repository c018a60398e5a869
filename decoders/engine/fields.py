"""The noise of positions, on the device: of every mask, for as long as it may be read.

Where steps draw anew, each forward computes the noise of its masks. Else every forward reads the noise of a mask until it is
revealed: where the noise of whole canvases fits into memory, it is computed once, when the mask is first asked about. Where it
does not fit, each forward computes it again.

Legend: S slots, W positions of a canvas, R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.draws import noise
from draftmill.decoders.engine.packing import Ints

_STEP = 64


class NoiseField:
    """Noise [S * W, V], float32, or none if that takes more than the account gives to noise, or if steps draw anew (`fresh`)."""

    def __init__(self, vocab_size: int, device: torch.device, *, fresh: bool = False) -> None:
        self._vocab_size, self._device, self._fresh = vocab_size, device, fresh
        self._kept_CV = torch.zeros(0, vocab_size, device=device)
        self._is_kept_SW = np.zeros((0, 0), dtype=np.bool_)

    def start(self, slot: int) -> None:
        """A new sample: nothing of its noise is kept."""
        self._is_kept_SW[slot : slot + 1] = False

    def missing(self, slot_R: Ints, position_R: Ints, most_bytes: int) -> Ints | None:
        """The slots and positions, [2, N], whose noise is to be computed; None where none is kept, in `most_bytes`."""
        needed = int(slot_R.max()) + 1, int(position_R.max()) + 1
        if not self._fresh and any(most > has for most, has in zip(needed, self._is_kept_SW.shape, strict=True)):
            num_slots, width = np.maximum((needed[0], rounded(needed[1], _STEP)), self._is_kept_SW.shape).tolist()
            num_cells = num_slots * width if num_slots * width * self._vocab_size * 4 <= most_bytes else 0
            self._kept_CV = torch.zeros(0, self._vocab_size, device=self._device)
            self._kept_CV = torch.zeros(num_cells, self._vocab_size, device=self._device)
            self._is_kept_SW = np.zeros((num_slots, width), dtype=np.bool_)
        if not len(self._kept_CV):
            return None
        is_new_R = ~self._is_kept_SW[slot_R, position_R]
        return np.unique(np.stack([slot_R, position_R])[:, is_new_R], axis=1)

    def fill(self, new_2N: Ints, new_4N: Tensor) -> None:
        """Compute what is `missing`; `new_4N` has the same on the device, and the words of the keys."""
        if new_4N.shape[1]:
            slot_N, position_N, *_ = new_4N
            cell_N = slot_N * self._is_kept_SW.shape[1] + position_N
            self._kept_CV[cell_N] = noise.gumbel_rows(new_4N[2:].T, position_N, self._vocab_size)
            self._is_kept_SW[new_2N[0], new_2N[1]] = True

    def rows(self, slot_R: Tensor, position_R: Tensor, keys_R2: Tensor, step_R: Tensor) -> Tensor:
        """The noise at each (slot, position), [R, V], where steps draw anew that of a step."""
        if len(self._kept_CV):
            return self._kept_CV.index_select(0, slot_R * self._is_kept_SW.shape[1] + position_R)
        step_R = step_R if self._fresh else torch.zeros_like(position_R)
        if self._device.type != "cpu":
            return noise.gumbel_rows(keys_R2, position_R, self._vocab_size, draws_R=step_R)
        # Nodes ask about the same masks. Here, looking at the data costs nothing.
        cells, which_R = torch.unique(torch.stack([slot_R, position_R, step_R]), dim=1, return_inverse=True)
        one = torch.zeros_like(cells[0]).scatter_(0, which_R, torch.arange(len(which_R)))
        return noise.gumbel_rows(keys_R2[one], position_R[one], self._vocab_size, draws_R=step_R[one])[which_R]
