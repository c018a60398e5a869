"""Estimates how likely drafts are accepted, per draft position and per slot."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

_FIRST_GUESS: Final = 0.7
_POSITION_MEMORY, _POSITION_PRIOR = 0.99, 4.0
_SLOT_MEMORY, _SLOT_PRIOR = 0.95, 16.0


class Survival:
    """Acceptance rates per draft position over all slots, and how far each slot deviates from them."""

    def __init__(self, num_slots: int, most: int) -> None:
        self._reached_K, self._passed_K = np.zeros(most), np.zeros(most)
        self._tried_S, self._gained_S = np.zeros(num_slots), np.zeros(num_slots)

    def start(self, slot: int) -> None:
        """Forget what the slot held."""
        self._tried_S[slot] = self._gained_S[slot] = 0.0

    def learn(self, slots_B: Counts, tried_B: Counts, gained_B: Counts) -> None:
        """Record how many of the tried drafts were accepted; slots that tried none do not count."""
        some_B = tried_B > 0
        slots_B, tried_B, gained_B = slots_B[some_B], tried_B[some_B], gained_B[some_B]
        if not len(slots_B):
            return
        for column_S, num_B in ((self._tried_S, np.minimum(gained_B + 1, tried_B)), (self._gained_S, gained_B)):
            column_S[slots_B] = _SLOT_MEMORY * column_S[slots_B] + num_B
        places_K = np.arange(1, len(self._reached_K) + 1)
        tried_B1, gained_B1 = tried_B[:, None], gained_B[:, None]
        reached_K = ((places_K <= tried_B1) & (places_K <= gained_B1 + 1)).sum(0)
        self._reached_K = _POSITION_MEMORY * self._reached_K + reached_K
        self._passed_K = _POSITION_MEMORY * self._passed_K + (places_K <= gained_B1).sum(0)

    def probabilities(self, slots_B: Counts) -> Numbers:
        """The probability that the first j drafts are accepted, j = 1 .. K, [B, K]."""
        rates_K, guess = np.empty_like(self._reached_K), _FIRST_GUESS
        for place in range(len(rates_K)):
            guess = (self._passed_K[place] + _POSITION_PRIOR * guess) / (self._reached_K[place] + _POSITION_PRIOR)
            rates_K[place] = guess
        tried_B1, gained_B1 = (column_S[slots_B, None] for column_S in (self._tried_S, self._gained_S))
        survival_BK: Numbers = ((gained_B1 + _SLOT_PRIOR * rates_K) / (tried_B1 + _SLOT_PRIOR)).cumprod(1)
        return survival_BK
