"""Caches the target noise of every position of every slot.

Every forward reads the noise of a masked position until the position is revealed. Noise that fits into memory is kept; the rest
is computed once per forward. Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.draws import noise
from decoders.engine.state import SlotState


class PositionNoise:
    """Noise [S, W, V] in float32, filled on demand; nothing is kept if that would be more than `most` numbers.

    By default these are as many as the state's `noise_bytes` allow.
    """

    def __init__(self, state: SlotState, vocab_size: int, *, most: int | None = None) -> None:
        self._state, self._vocab_size = state, vocab_size
        self._asked = most
        self._kept_SWV = torch.zeros(0, 0, 0, device=state.device)
        self._known_SW = torch.zeros(state.num_slots, 0, dtype=torch.bool, device=state.device)

    @property
    def _most(self) -> int:
        return self._state.noise_bytes // 4 if self._asked is None else self._asked

    def forget(self, slot: int) -> None:
        """Forget the noise of `slot`: a new sample starts there."""
        self._known_SW[slot] = False

    def move(self, source: int, target: int) -> None:
        """A sample moves from one slot to another; its noise is recomputed when needed."""
        self._known_SW[target] = False

    def rows(self, slots_R: Tensor, positions_R: Tensor) -> Tensor:
        """Return the noise at each (slot, position), float32 [R, V]."""
        width = self._state.order_SW.shape[1]
        if self._state.num_slots * width * self._vocab_size > self._most:
            cells, which_R = torch.unique(slots_R * width + positions_R, return_inverse=True)
            return self._computed(cells // width, cells % width)[which_R]
        if self._known_SW.shape[1] != width:
            self._kept_SWV = torch.zeros(self._state.num_slots, width, self._vocab_size, device=self._state.device)
            self._known_SW = torch.zeros(self._state.num_slots, width, dtype=torch.bool, device=self._state.device)
        new_R = ~self._known_SW[slots_R, positions_R]
        if bool(new_R.any()):
            cells = torch.unique(slots_R[new_R] * width + positions_R[new_R])
            where = (cells // width, cells % width)
            self._kept_SWV[where] = self._computed(*where)
            self._known_SW[where] = True
        return self._kept_SWV[slots_R, positions_R]

    def _computed(self, slots_N: Tensor, positions_N: Tensor) -> Tensor:
        return noise.gumbel_rows(self._state.key_S2[slots_N], positions_N, self._vocab_size)
