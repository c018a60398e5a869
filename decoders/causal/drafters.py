"""What `specdiff` asks of a source of drafts.

A drafter writes its drafts into the slots' undecided columns and returns their number and the distributions that they were drawn
from. It knows nothing of acceptance rules; afterwards it is given how far the columns were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from decoders.engine.state import Group

DrawAt = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [R, V], slots [R], ranks [R], decided [R]) -> (distribution q [R, V], tokens [R]): suppresses, warps, draws."""
Allot = Callable[[Tensor], Tensor]
"""How many drafts each slot could have, [B] -> how many it gets, [B]."""


class CausalDrafter(Protocol):
    """A source of drafts for the slots of one decoder."""

    @property
    def forward_s(self) -> float:
        """Seconds of forward evaluations so far."""
        ...

    def draft(self, group: Group, most_B: Tensor, allot: Allot) -> tuple[Tensor, Tensor | None]:
        """Draft at most `most_B` tokens after each slot's decided ones; returns (number [B], distributions [B, K, V] or None).

        None means that the drafts were certain, or that their distributions are not needed.
        """
        ...

    def known(self, slots_B: Tensor, end_B: Tensor) -> None:
        """Record that the tokens below `end_B` are decided as the drafter saw them; later columns may change."""
        ...

    def make_room(self, num_slots: int, num_columns: int) -> None:
        """Resize to this many slots and columns; both 0 frees all."""
        ...

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes that the drafter keeps for a slot with this many columns."""
        ...

    def start(self, slot: int) -> None:
        """Start a new sample in `slot`."""
        ...

    def move(self, source: int, target: int) -> None:
        """Move a sample from one slot to another; the columns of the SlotState move by themselves."""
        ...

    def spent(self, slot: int) -> tuple[int, float]:
        """The forwards in which the slot's sample took part, and its share of their seconds."""
        ...
