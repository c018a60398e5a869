"""What a forward with a cache runs of a canvas: all of it where the cache is made anew, else a window around its masks.

    block_length 4           position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    the cache is made                    x x x   x x x x   x x x x    x
    then, in the first block             . . .   x x x x   . . . .    .      `prefix` runs all behind it too
    the first in the second block,
    where the cache is not made anew     . . .   x x x x   x x x x    .

What is not run is read as it was left. The cache is made anew when a block is begun; or, with `refresh`, once so many tokens were
revealed since it was made, wherever blocks begin. A block that ended since the last forward is then run once more, so that its
last token is not read as the mask that it was. A model with a shift reads a position from the row before it, which therefore
is run with the window.

Sources: Wu et al., "Fast-dLLM" (2025), section 3.2, whose caches live as long as a block; the interval in tokens is that of the
SSD paper, section 4.1, which leaves open what becomes of a finished block. Knows nothing of models.

Legend: B slots of this step, W positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.engine.state import SlotState
from decoders.masked.canvases import CanvasState


class CachedWindows:
    """When each slot's cache was made, and the windows that follow from it."""

    def __init__(self, state: SlotState, canvas: CanvasState, *, kind: str, refresh: int | None, shift: int) -> None:
        self._state, self._canvas = state, canvas
        self.to_end, self.refresh, self.shift = kind == "prefix", refresh, shift
        self._block_S, self.made_at_S = state.column(), state.column()
        """The block of the last forward plus one, 0 before the first; how many tokens were decided when the cache was made."""

    def next_run(self, slots_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark what this step's forward runs of canvases whose next masks are in `block_B`, and take note of it, bool [B, W]."""
        last_B, decided_B = self._block_S[slots_B] - 1, self._state.decided_S[slots_B]
        if self.refresh is None:
            anew_B = last_B != block_B
        else:
            anew_B = (last_B < 0) | (decided_B - self.made_at_S[slots_B] >= self.refresh)
        self.enter(slots_B, block_B, torch.where(anew_B, decided_B, self.made_at_S[slots_B]))
        return anew_B.unsqueeze(1) | self.between(slots_B, last_B, block_B, blocks_BW)

    def between(self, slots_B: Tensor, last_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark what a forward in `block_B` runs after one in `last_B` where nothing is made anew, bool [B, W]."""
        return self.window(slots_B, last_B, blocks_BW) | self.window(slots_B, block_B, blocks_BW)

    def anew_after(self, slots_N: Tensor, count_N: Tensor, last_N: Tensor, block_N: Tensor) -> Tensor:
        """Whether the cache is made anew, for the first time, when `count_N` more tokens are revealed, bool [N].

        The forward is one in `block_N` after one in `last_N`.
        """
        return last_N != block_N if self.refresh is None else count_N == self._left(slots_N, self.refresh)

    def enter(self, slots_B: Tensor, block_B: Tensor, made_at_B: Tensor) -> None:
        """Take note that the last forward was in this block, and what was decided when its cache was made."""
        self._block_S[slots_B], self.made_at_S[slots_B] = block_B + 1, made_at_B

    def decided(self, slots_N: Tensor) -> Tensor:
        """How many tokens are decided."""
        return self._state.decided_S[slots_N]

    def window(self, slots_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark a block, with `prefix` all behind it too, and the row that its first position is read from, bool [B, W]."""
        size = self._canvas.block_length or blocks_BW.shape[1]
        positions_W = torch.arange(blocks_BW.shape[1], device=blocks_BW.device)
        origin_B = self._canvas.origin_S[slots_B]
        start_B1 = (origin_B + block_B * size).unsqueeze(1)
        window_BW = positions_W >= start_B1 - self.shift
        return window_BW if self.to_end else window_BW & (positions_W < start_B1 + size)

    def until_refresh(self, slots_B: Tensor) -> Tensor | None:
        """How many tokens may be revealed, this step's first included, before the cache is made anew, [B]; None: any number."""
        return None if self.refresh is None else self._left(slots_B, self.refresh)

    def _left(self, slots_B: Tensor, refresh: int) -> Tensor:
        return refresh - (self._state.decided_S[slots_B] - self.made_at_S[slots_B])
