"""The canvases of masked diffusion: one row per slot, one column per position, HOLE at remaining masks.

A canvas is cut into blocks of `block_length` positions, the first of which begins at the first hole, so that the blocks of a
completion are those of the public code; if `block_length` is None the whole canvas is one block. Holes may be anywhere;
positions without a mask are never changed.

    position    0 1 2 | 3 4 5 6 | 7 8 9 10 | 11        block_length 4, the first hole at 3
    block       0 0 0   0 0 0 0   1 1 1 1    2

Also finds the positions that come next: the masks of the first block that has any. Knows nothing of models.

Legend: N canvases of a forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.base import HOLE, Request
from decoders.engine.state import SlotState


class CanvasState:
    """Position-indexed state beside `SlotState`, whose ranks become the order in which positions are revealed."""

    def __init__(self, state: SlotState, block_length: int | None) -> None:
        self._state, self.block_length = state, block_length
        empty = torch.zeros(state.num_slots, 0, dtype=torch.int64, device=state.device)
        self.tokens_SW, self.log_p_SW = empty, empty.to(torch.float64)
        self.commits_SW = empty
        """Histogram: how many iterations revealed each number of tokens."""
        self.drafts_SW, self.draft_sure_SW = empty, empty.to(torch.float64)
        """The last predictions for masks, and their confidences; -inf without a prediction."""
        self.origin_S, self.num_blocks_S = state.column(), state.column()

    def start(self, slot: int, request: Request) -> None:
        """Put a request's canvas into its slot; it has at least one hole."""
        canvas_L = torch.from_numpy(request.canvas).to(self._state.device, torch.int64)
        length = len(canvas_L)
        self._widen(length)
        for grid in self._grids():
            grid[slot] = 0
        self.draft_sure_SW[slot] = -torch.inf
        self.tokens_SW[slot, :length] = canvas_L
        holes = (canvas_L == HOLE).nonzero().squeeze(1)
        self.origin_S[slot] = holes[0]
        size = self.block_length or length
        self.num_blocks_S[slot] = len(torch.unique((holes - holes[0]) // size))

    def _widen(self, length: int) -> None:
        # One more column than positions: an iteration may reveal 0 to `length` tokens.
        extra = length + 1 - self.tokens_SW.shape[1]
        if extra > 0:
            self.tokens_SW, self.log_p_SW, self.commits_SW, self.drafts_SW, self.draft_sure_SW = (
                torch.nn.functional.pad(grid, (0, extra)) for grid in self._grids()
            )

    def _grids(self) -> tuple[Tensor, ...]:
        return self.tokens_SW, self.log_p_SW, self.commits_SW, self.drafts_SW, self.draft_sure_SW

    def move(self, source: int, target: int) -> None:
        """Move a sample from one slot to another."""
        for grid in self._grids():
            grid[target] = grid[source]

    def blocks(self, slots_B: Tensor, width: int) -> Tensor:
        """The block of each position, int64 [B, width]."""
        offsets_BW = torch.arange(width, device=slots_B.device) - self.origin_S[slots_B].unsqueeze(1)
        return offsets_BW.clamp(min=0) // (self.block_length or max(width, 1))

    def reveal(self, slots_B: Tensor, positions_BT: Tensor, told_BT: tuple[Tensor, Tensor], counts_B: Tensor) -> None:
        """Put the first `counts_B` tokens and log-probabilities of each row in place, and their positions into the ranks."""
        tokens_BT, log_p_BT = told_BT
        keep_BT = torch.arange(positions_BT.shape[1], device=slots_B.device) < counts_B.unsqueeze(1)
        slots_BT = slots_B.unsqueeze(1).expand_as(keep_BT)
        where = (slots_BT[keep_BT], positions_BT[keep_BT])
        self.tokens_SW[where], self.log_p_SW[where] = tokens_BT[keep_BT], log_p_BT[keep_BT]
        ranks_BT = self._state.decided_S[slots_B].unsqueeze(1) + torch.arange(keep_BT.shape[1], device=slots_B.device)
        self._state.order_SW[slots_BT[keep_BT], ranks_BT[keep_BT]] = positions_BT[keep_BT]


def first_block(masked_NW: Tensor, blocks_NW: Tensor) -> Tensor:
    """The first block of each canvas that has a mask, int64 [N]; a block beyond all others if no mask remains."""
    beyond = torch.iinfo(torch.int64).max
    return torch.where(masked_NW, blocks_NW, beyond).amin(1)


def next_up(masked_NW: Tensor, blocks_NW: Tensor) -> Tensor:
    """Mark the positions that may be revealed next, bool [N, W]: the masks of the first block that has any."""
    return masked_NW & (blocks_NW == first_block(masked_NW, blocks_NW).unsqueeze(1))
