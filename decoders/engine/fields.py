"""The noise of positions, on the device: of every mask, for as long as it may be read.

Where steps draw anew, each forward computes the noise of its masks. Else every forward reads the noise of a mask until it is
revealed: where the noise of whole canvases fits into memory, it is computed once, from left to right as far as masks are asked
about; which masks these are the host knows. Where it does not fit, each forward computes it again.

Legend: S slots, W positions of a canvas, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.packing import Ints


class NoiseField:
    """Noise [S * W, V], float32, or none if that takes more than the account gives to noise, or if steps draw anew (`fresh`)."""

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        device: torch.device,
        account: Callable[[], Account],
        *,
        fresh: bool = False,
    ) -> None:
        self._vocab_size, self._device, self._account, self._fresh = vocab_size, device, account, fresh
        self._kept_CV = torch.zeros(0, vocab_size, device=device)
        self._shape = (0, 0)
        # The noise of the masks below this position is kept.
        self._until_S: Ints = np.zeros(num_slots, dtype=np.int64)

    def start(self, slot: int) -> None:
        """A new sample: nothing of its noise is kept."""
        self._until_S[slot] = 0

    @property
    def is_kept(self) -> bool:
        """Whether noise is kept at all."""
        return len(self._kept_CV) > 0

    def missing(self, samples: Sequence[Canvas], top_B: Ints, shape: tuple[int, int]) -> Ints:
        """(cell, position, key, key) of the masks below `top_B` whose noise is not kept yet, [4, N]; then it counts as kept.

        `shape` are the slots and positions that there are now.
        """
        if shape != self._shape:
            self._resize(*shape)
        found: list[Ints] = []
        if self.is_kept:
            for sample, top in zip(samples, top_B.tolist(), strict=True):
                first = int(self._until_S[sample.slot])
                if first < top:
                    at = first + np.flatnonzero(sample.request.canvas[first:top] < 0)
                    low, high = split_key(sample.key)
                    found.append(np.stack([at + sample.slot * shape[1], at, at * 0 + low, at * 0 + high]))
                    self._until_S[sample.slot] = top
        return np.concatenate(found, 1) if found else np.zeros((4, 0), dtype=np.int64)

    def _resize(self, num_slots: int, width: int) -> None:
        num_cells = num_slots * width
        if self._fresh or num_cells * self._vocab_size * 4 > self._account().noise:
            num_cells = 0
        self._kept_CV = torch.zeros(0, self._vocab_size, device=self._device)
        self._kept_CV = torch.zeros(num_cells, self._vocab_size, device=self._device)
        self._shape = num_slots, width
        self._until_S[:] = 0

    def fill(self, new_4N: Tensor) -> None:
        """Compute what is `missing`."""
        if new_4N.shape[1]:
            self._kept_CV[new_4N[0]] = noise.gumbel_rows(new_4N[2:].T, new_4N[1], self._vocab_size)

    def rows(self, slot_R: Tensor, position_R: Tensor, keys_R2: Tensor, step_R: Tensor) -> Tensor:
        """The noise at each (slot, position), [R, V], where steps draw anew that of a step."""
        cell_R = slot_R * self._shape[1] + position_R
        if self.is_kept:
            return self._kept_CV.index_select(0, cell_R)
        step_R = step_R if self._fresh else torch.zeros_like(position_R)
        if self._device.type != "cpu":
            return noise.gumbel_rows(keys_R2, position_R, self._vocab_size, draws_R=step_R)
        # Nodes ask about the same masks. Here, looking at the data costs nothing.
        cells, which_R = torch.unique(torch.stack([cell_R, step_R]), dim=1, return_inverse=True)
        one = torch.zeros_like(cells[0]).scatter_(0, which_R, torch.arange(len(which_R)))
        return noise.gumbel_rows(keys_R2[one], position_R[one], self._vocab_size, draws_R=step_R[one])[which_R]
