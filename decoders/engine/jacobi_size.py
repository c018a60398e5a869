"""Finds the Jacobi block size with the most tokens per second while decoding (`block_size: auto`).

DraftBudget (engine/budget.py) judges a draft by its acceptance in this forward. A Jacobi draft also helps later: a row's
prediction is the draft of a later iteration, and is accepted only if the block stays as large for a few iterations. So whole
sizes are compared: each is kept for some steps, its gain and its rows per iteration are recorded, and the cost table (cost.py)
gives the seconds for the current number of slots. The search starts with no drafts and one middle size and moves to better
neighbours; later it tries a neighbour again now and then, ever more rarely while the same size stays the best. With more slots
the first size is smaller, since all of them pay for a trial. The ledger (ledger.py) records the real gains and losses: while
trials have cost more than their share of the time, nothing is drafted.

No choice can change a text: the tokens are those of the sequential decoder whatever is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from draftmill.decoders.engine.cost import CostTable
from draftmill.decoders.engine.ledger import Ledger

SIZES: Final = (0, 2, 4, 8, 16, 32)
MOST_AUTO: Final = SIZES[-1]
"""The largest block that `auto` chooses."""
# The first size, and the bound on its drafts over all slots.
_FIRST, _FIRST_DRAFTS = 8, 32
# The iterations (over all slots) and steps of a trial; its first steps only fill the block and do not count.
_ITERATIONS, _LEAST_STEPS, _MOST_STEPS, _WARM = 64, 4, 16, 2
_AGAIN_AFTER, _AGAIN_AT_MOST = 64, 1024
# The factor by which drafting must beat not drafting before the estimates are trusted.
_MARGIN: Final = 1.03
# The weight of a step, and of a whole trial, in the running means.
_MEMORY, _TRIAL_WEIGHT = 1 / 32, 1 / 2


@dataclass(slots=True)
class _Known:
    """Gain and rows of an iteration with blocks of one size, per slot; running means."""

    tokens: float
    rows: float
    tried_at: int = 0

    def add(self, tokens: float, rows: float, weight: float) -> None:
        self.tokens += weight * (tokens - self.tokens)
        self.rows += weight * (rows - self.rows)


class JacobiSizes:
    """Chooses the block size of every step; each `choose` is followed by one `observe`."""

    def __init__(self) -> None:
        self.cost = CostTable()
        self._known = {0: _Known(1.0, 1.0)}
        self._size, self._steps_at, self._trial_left = 0, 0, _WARM
        self._num_steps, self._next_trial = 0, 0
        self._settled, self._wait = 0, _AGAIN_AFTER
        self._trying = False
        self._gathered: list[tuple[float, float]] = []
        self._ledger, self._plain_s = Ledger(), 0.0

    def choose(self, num_slots: int, kv_tokens: int) -> int:
        """Choose the size for this step, given its slots and the columns that they read."""
        self._num_steps += 1
        if not self._ledger.allows(self._plain_s):
            self._trying, self._trial_left = False, 0
            self._turn_to(0)
            return 0
        if self._trial_left:
            self._trial_left -= 1
            return self._size
        best = self._best(num_slots, kv_tokens)
        if best != self._settled:
            self._settled, self._wait = best, _AGAIN_AFTER
        wanted = self._to_try(best, num_slots)
        self._trying = wanted is not None
        if self._trying:
            self._trial_left = _WARM + min(max(_ITERATIONS // num_slots, _LEAST_STEPS), _MOST_STEPS) - 1
        self._turn_to(best if wanted is None else wanted)
        return self._size

    def observe(self, num_slots: int, rows: int, kv_tokens: int, *, tokens: int, seconds: float) -> None:
        """Record the step's rows, its committed tokens and its seconds."""
        self.cost.observe(rows, kv_tokens, seconds)
        self._settle(num_slots, kv_tokens, tokens, seconds)
        self._steps_at += 1
        if self._steps_at <= _WARM or self._size == 0:
            return
        won, took = tokens / num_slots, rows / num_slots
        if not self._trying:
            self._known[self._size].add(won, took, _MEMORY)
            return
        self._gathered.append((won, took))
        if not self._trial_left:
            won, took = np.mean(self._gathered, axis=0).tolist()
            self._known.setdefault(self._size, _Known(won, took)).add(won, took, _TRIAL_WEIGHT)

    def _settle(self, num_slots: int, kv_tokens: int, tokens: int, seconds: float) -> None:
        if self._size and (cost := self.cost.cost()) is not None:
            self._plain_s = float(cost.seconds(np.array([float(num_slots)]), kv_tokens)[0])
        self._ledger.spend(seconds)
        self._ledger.win(tokens)
        self._ledger.close(drafting=self._size > 0, plain_step_s=self._plain_s, num_slots=num_slots)

    def _turn_to(self, size: int) -> None:
        if size != self._size:
            self._size, self._steps_at = size, 0
            self._gathered.clear()

    def _best(self, num_slots: int, kv_tokens: int) -> int:
        cost = self.cost.cost()
        if cost is None:
            return self._size
        sizes = list(self._known)
        rows = np.array([self._known[size].rows for size in sizes]) * num_slots
        tokens = np.array([self._known[size].tokens * (1.0 if size else _MARGIN) for size in sizes])
        rates = tokens / cost.seconds(rows, kv_tokens)
        return sizes[int(rates.argmax())]

    def _to_try(self, best: int, num_slots: int) -> int | None:
        """A neighbour that was never tried, or the least recently tried one if a retry is due; else None."""
        if len(self._known) == 1:
            return max(size for size in SIZES if size <= max(min(_FIRST, _FIRST_DRAFTS // num_slots), SIZES[1]))
        place = SIZES.index(best)
        near = [SIZES[i] for i in (place - 1, place + 1) if 0 <= i < len(SIZES) and SIZES[i]]
        for size in near:
            if size not in self._known:
                return size
        if self._num_steps < self._next_trial or not near:
            return None
        self._wait = min(2 * self._wait, _AGAIN_AT_MOST)
        self._next_trial = self._num_steps + self._wait
        oldest = min(near, key=lambda size: self._known[size].tried_at)
        self._known[oldest].tried_at = self._num_steps
        return oldest
