"""Which positions a forward with a cache runs: the whole canvas when the cache is rebuilt, else a window around its masks.

    block_length 4           position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11
    the cache is built                   x x x   x x x x   x x x x    x
    then, in the first block             . . .   x x x x   . . . .    .      `prefix` runs all after it too
    the first in the second block,
    where the cache is not rebuilt       . . .   x x x x   x x x x    .

Other positions are read from the cache. It is rebuilt at the start of each block; or, with `refresh`, after that many tokens,
wherever blocks begin. In the latter case a block that ended since the last forward runs once more, so that its last token is not
read as the mask that it was. A model with a shift reads a position from the row before it, so that row runs with the window.

Sources: Wu et al., "Fast-dLLM" (2025), section 3.2, whose caches live as long as a block; the interval in tokens is that of the
SSD paper, section 4.1, which does not specify how to treat a finished block. Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.engine.state import SlotState
from decoders.masked.canvases import CanvasState


class CachedWindows:
    """When each slot's cache was built, and the windows that follow from it."""

    def __init__(self, state: SlotState, canvas: CanvasState, *, kind: str, refresh: int | None, shift: int) -> None:
        self._state, self._canvas = state, canvas
        self.to_end, self.refresh, self.shift = kind == "prefix", refresh, shift
        self._block_S, self.made_at_S = state.column(), state.column()
        """The block of the last forward plus one, 0 before the first; how many tokens were decided when the cache was built."""

    def next_run(self, slots_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark and record what this step's forward runs of canvases whose next masks are in `block_B`, bool [B, W]."""
        last_B, decided_B = self._block_S[slots_B] - 1, self._state.decided_S[slots_B]
        if self.refresh is None:
            anew_B = last_B != block_B
        else:
            anew_B = (last_B < 0) | (decided_B - self.made_at_S[slots_B] >= self.refresh)
        self.enter(slots_B, block_B, torch.where(anew_B, decided_B, self.made_at_S[slots_B]))
        return anew_B.unsqueeze(1) | self.between(slots_B, last_B, block_B, blocks_BW)

    def between(self, slots_B: Tensor, last_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark what a forward in `block_B` runs after one in `last_B` without a rebuild, bool [B, W]."""
        return self.window(slots_B, last_B, blocks_BW) | self.window(slots_B, block_B, blocks_BW)

    def anew_after(self, slots_N: Tensor, count_N: Tensor, last_N: Tensor, block_N: Tensor) -> Tensor:
        """Whether the next rebuild of the cache is due exactly when `count_N` more tokens are revealed, bool [N].

        The forward is one in `block_N` after one in `last_N`.
        """
        return last_N != block_N if self.refresh is None else count_N == self._left(slots_N, self.refresh)

    def enter(self, slots_B: Tensor, block_B: Tensor, made_at_B: Tensor) -> None:
        """Record the block of the last forward, and how many tokens were decided when its cache was built."""
        self._block_S[slots_B], self.made_at_S[slots_B] = block_B + 1, made_at_B

    def decided(self, slots_N: Tensor) -> Tensor:
        """How many tokens are decided."""
        return self._state.decided_S[slots_N]

    def window(self, slots_B: Tensor, block_B: Tensor, blocks_BW: Tensor) -> Tensor:
        """Mark a block, with `prefix` all after it too, and the row that its first position is read from, bool [B, W]."""
        size = self._canvas.block_length or blocks_BW.shape[1]
        positions_W = torch.arange(blocks_BW.shape[1], device=blocks_BW.device)
        origin_B = self._canvas.origin_S[slots_B]
        start_B1 = (origin_B + block_B * size).unsqueeze(1)
        window_BW = positions_W >= start_B1 - self.shift
        return window_BW if self.to_end else window_BW & (positions_W < start_B1 + size)

    def until_refresh(self, slots_B: Tensor) -> Tensor | None:
        """How many tokens may be revealed, this step's first included, before the next rebuild, [B]; None: any number."""
        return None if self.refresh is None else self._left(slots_B, self.refresh)

    def _left(self, slots_B: Tensor, refresh: int) -> Tensor:
        return refresh - (self._state.decided_S[slots_B] - self.made_at_S[slots_B])
