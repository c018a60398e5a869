"""What prompts have in common: how many columns of a new sample's prompt another slot holds already, and which slot.

    slot 0    shots shots question A          its prompt ran: all of its columns are in place
    slot 1    shots shots question B          takes over what it has in common with A, and runs the rest
    slot 2    (free) shots shots question C   what the last sample left there stays good until it is overwritten

In a causal model a column depends on the tokens up to its own: any common beginning can be taken over. In block diffusion whole
blocks can, in an any-subset model, whose prompt sees all of itself, the whole prompt or nothing. Prompts are compared as
integers: tokens, or (any-subset) tokens with their positions. Numpy only; the engine copies what is on the device.

Legend: S slots, C columns, A some slots.
"""

from __future__ import annotations

import numpy as np

from draftmill.decoders.engine.algorithm import WHOLE
from draftmill.decoders.engine.asks import Ints


class PrefixCache:
    """The prompt of each slot's sample, also of one that has left, and how many of its columns the cache holds.

    What is taken over is a multiple of `multiple` columns.
    """

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple
        self._prompt_SC = np.zeros((0, 0), dtype=np.int64)
        self._length_S, self._held_S = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def resize(self, num_slots: int, num_columns: int) -> None:
        """The cache has another size: what fits into it is still there."""
        prompt_SC, length_S, held_S = self._prompt_SC, self._length_S, self._held_S
        slots, columns = min(num_slots, prompt_SC.shape[0]), min(num_columns, prompt_SC.shape[1])
        self._prompt_SC = np.zeros((num_slots, num_columns), dtype=np.int64)
        self._length_S, self._held_S = np.zeros(num_slots, dtype=np.int64), np.zeros(num_slots, dtype=np.int64)
        self._prompt_SC[:slots, :columns] = prompt_SC[:slots, :columns]
        self._length_S[:slots] = length_S[:slots]
        self._held_S[:slots] = np.where(length_S[:slots] <= columns, held_S[:slots], 0)

    def insert(self, slot: int, prompt: Ints, most: int) -> int:
        """A new sample comes into a slot; returns how many columns, at most `most`, the last one left there for it."""
        own, length = np.array([slot]), len(prompt)
        differ = np.flatnonzero(self._prompt_SC[slot, :most] != prompt[:most])
        common_A = np.minimum(int(differ[0]) if len(differ) else most, self._held_S[own])
        found = int(self._whole(common_A, own, length)[0])
        self._prompt_SC[slot, :length] = prompt
        self._length_S[slot], self._held_S[slot] = length, found
        return found

    def holds(self, slot: int, count: int) -> None:
        """The first `count` columns of the prompt in a slot are in place."""
        self._held_S[slot] = count

    def forget(self, slot: int) -> None:
        """Nothing in a slot can be taken over."""
        self._held_S[slot] = 0

    def find(self, slot: int, most: int) -> tuple[int, int]:
        """How much of the prompt in `slot` another slot holds, at most `most` columns, and which slot; 0 and -1 where none
        does."""
        others = np.flatnonzero(self._held_S)
        return self._longest(slot, most, others[others != slot], self._held_S)

    def find_pending(self, slot: int, most: int, coming: list[int]) -> tuple[int, int]:
        """How much of it one of these slots will hold when its own prompt has run."""
        return self._longest(slot, most, np.array(coming, dtype=np.int64), self._length_S)

    def _longest(self, slot: int, most: int, some_A: Ints, limit_S: Ints) -> tuple[int, int]:
        # Most prompts that differ do so at once.
        some_A = some_A[self._prompt_SC[some_A, 0] == self._prompt_SC[slot, 0]]
        if not len(some_A):
            return 0, -1
        same_AC = self._prompt_SC[some_A, :most] == self._prompt_SC[slot, :most]
        common_A = np.minimum(np.where(same_AC.all(1), most, same_AC.argmin(1)), limit_S[some_A])
        common_A = self._whole(common_A, some_A, int(self._length_S[slot]))
        best = int(common_A.argmax())
        return (int(common_A[best]), int(some_A[best])) if common_A[best] else (0, -1)

    def _whole(self, common_A: Ints, some_A: Ints, length: int) -> Ints:
        """What a prompt of this length can take over of what it has in common with these slots' prompts."""
        if self._multiple == WHOLE:
            return np.where((common_A == length) & (self._length_S[some_A] == length), length, 0)
        return common_A - common_A % self._multiple
