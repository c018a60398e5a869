"""The block-diffusion state of every slot: its block, the phase of its next forward, and the block's last draft.

A canvas is a prompt and then holes; rank = column = position, and HOLE marks a remaining mask. Blocks begin at multiples of
their size, so a prompt's tail lies in the block that is filled first. The last block has full size where the model's length
allows it, even if less of it was requested:

    position    0 1 2 3 | 4 5 6 7 | 8 9 10 11      block size 4, a prompt of 6, up to 3 new tokens
    holds       prompt  | p p _ _ | _ . .  .       the places after the canvas are masks too, and cut off at the end

Knows nothing of models. Legend: T places of a block, K kinds of forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from decoders.base import HOLE, Request
from decoders.engine.state import SlotState

PREFILL, DRAFT, VERIFY, COMMIT = range(4)
KINDS: Final = ("prefill", "draft", "verify", "commit")
"""The phases of a slot's forward."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A snapshot of the current blocks of some slots.

    `tokens_BT` has HOLE at masks (`masks_BT`), and 0 outside of a block that is cut short; `offsets_T` are the places of a block.
    """

    slots_B: Tensor
    start_B: Tensor
    end_B: Tensor
    positions_BT: Tensor
    inside_BT: Tensor
    tokens_BT: Tensor
    masks_BT: Tensor
    slots_BT: Tensor
    offsets_T: Tensor

    def first_mask(self) -> Tensor:
        """The place of the first mask; the block's size if no mask remains, [B]."""
        size = self.positions_BT.shape[1]
        return torch.where(self.masks_BT, self.offsets_T, size).amin(1)

    def segment(self, sub_block: int) -> Tensor:
        """The masks of the first sub-block that has any, bool [B, T]."""
        number_B1 = self.first_mask().unsqueeze(1) // sub_block
        return self.masks_BT & (self.offsets_T // sub_block == number_B1)


class BlockState:
    """Columns beside `SlotState`, whose `tokens_SW` are the canvas."""

    def __init__(self, state: SlotState, size: int, max_length: int | None) -> None:
        self._state, self.size, self._max_length = state, size, max_length
        self.start_S, self.end_S, self.full_S = state.column(), state.column(), state.column()
        """The current block, and where the last one ends."""
        self.phase_S, self.step_S, self.post_S = state.column(), state.column(), state.column()
        """The phase of the next forward; denoising steps of the segment so far; steps since the last mask was revealed."""
        self.drafts_S, self.masks_S = state.column(), state.column()
        """Drafting forwards so far; the masks that the block began with."""
        self.done_S, self.uncommitted_S = state.column(dtype=torch.bool), state.column(dtype=torch.bool)
        """Whether the sample is finished; whether the next draft also commits the block before it."""
        self.nfe_SK = state.column(len(KINDS))
        self.log_p_SW = torch.zeros(state.num_slots, 0, dtype=torch.float64, device=state.device)

    def full(self, length: int) -> int:
        """Where the last block of a canvas ends."""
        whole = -(-length // self.size) * self.size
        return whole if self._max_length is None else max(min(whole, self._max_length), length)

    def start(self, slot: int, request: Request) -> None:
        """Begin a request whose canvas is already in `SlotState`."""
        state, length = self._state, len(request.canvas)
        prompt, full = int(state.prompt_S[slot]), self.full(length)
        extra = state.tokens_SW.shape[1] - self.log_p_SW.shape[1]
        if extra > 0:
            self.log_p_SW = torch.nn.functional.pad(self.log_p_SW, (0, extra))
        self.log_p_SW[slot] = 0.0
        state.tokens_SW[slot, prompt:] = 0
        state.tokens_SW[slot, prompt:full] = HOLE
        self.full_S[slot] = full
        self.phase_S[slot] = DRAFT if prompt < self.size else PREFILL
        self.enter(torch.tensor([slot], device=state.device), state.prompt_S[[slot]] // self.size * self.size)

    def enter(self, slots_B: Tensor, start_B: Tensor) -> None:
        """Move to the block that begins at `start_B`."""
        self.start_S[slots_B] = start_B
        self.end_S[slots_B] = torch.minimum(start_B + self.size, self.full_S[slots_B])
        self.step_S[slots_B] = self.post_S[slots_B] = 0
        self.masks_S[slots_B] = self.at(slots_B).masks_BT.sum(1)

    def move(self, source: int, target: int) -> None:
        """Move a sample from one slot to another."""
        self.log_p_SW[target] = self.log_p_SW[source]

    def at(self, slots_B: Tensor) -> Blocks:
        """The blocks of some slots."""
        start_B, end_B = self.start_S[slots_B], self.end_S[slots_B]
        offsets_T = torch.arange(self.size, device=slots_B.device)
        positions_BT = start_B.unsqueeze(1) + offsets_T
        slots_BT = slots_B.unsqueeze(1).expand_as(positions_BT)
        inside_BT = positions_BT < end_B.unsqueeze(1)
        tokens_BT = torch.where(inside_BT, self._state.tokens_SW[slots_BT, positions_BT], 0)
        masks_BT = tokens_BT == HOLE
        return Blocks(slots_B, start_B, end_B, positions_BT, inside_BT, tokens_BT, masks_BT, slots_BT, offsets_T)
