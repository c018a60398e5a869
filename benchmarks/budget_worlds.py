"""Worlds whose costs and acceptances are known, in which the budget of drafts (engine/budget.py) runs without clock or model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.cost import CostTable

MOST = 16
"""The most drafts of a slot."""


class World:
    """Slots whose drafts are accepted at given rates; a forward takes `base`, and `per_token` seconds per token after `free`.

    `drafter` has the seconds of a drafting forward, and for each of its rows; None if drafts cost nothing.
    """

    def __init__(
        self,
        rates: Sequence[float] | NDArray[np.float64],
        *,
        base: float = 1.0,
        per_token: float = 0.05,
        free: int = 0,
        drafter: tuple[float, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.rates, self.num = np.array(rates, dtype=float), len(rates)
        self.base, self.per_token, self.free, self.drafter = base, per_token, free, drafter
        self.rng = np.random.default_rng(seed)
        self.draft_costs = CostTable() if drafter else None
        self.budget = DraftBudget(self.num, MOST, drafter=self.draft_costs)
        self.slots, self.kv = np.arange(self.num), 100 * self.num

    def noisy(self, seconds: float) -> float:
        """Seconds as a clock measures them: up to some tenths more, and now and then five times as much."""
        return seconds * (1 + 0.1 * abs(self.rng.standard_normal())) * (5 if self.rng.random() < 0.01 else 1)

    def seconds(self, counts: Any) -> tuple[float, list[tuple[int, float]]]:
        """The seconds of the target's forward, and the (rows, seconds) of each of the drafter's."""
        target = self.base + self.per_token * max(self.num + counts.sum() - self.free, 0)
        if not self.drafter:
            return target, []
        rows = [int((counts > depth).sum()) for depth in range(counts.max(initial=0))]
        return target, [(num, self.drafter[0] + self.drafter[1] * num) for num in rows]

    def step(self, counts: Any) -> tuple[int, float]:
        """The tokens committed and the seconds of one step, which the budget records."""
        target, drafting = self.seconds(counts)
        self.budget.note_step(int(self.num + counts.sum()), self.kv, self.noisy(target))
        for num, seconds in drafting:
            assert self.draft_costs is not None
            took = self.noisy(seconds)
            self.draft_costs.observe(num, self.kv, took)
            self.budget.spend(took)
        true = (self.rng.random((self.num, MOST)) < self.rates[:, None]).cumprod(1).sum(1)
        gained = np.minimum(true, counts)
        self.budget.learn(self.slots, counts, gained)
        return int(self.num + gained.sum()), target + sum(seconds for _, seconds in drafting)

    def plan(self, most: int = MOST, fresh: bool = False) -> Any:
        """The drafts of each slot."""
        return self.budget.plan(self.slots, np.full(self.num, most), kv_tokens=self.kv, fresh=fresh)

    def run(self, num_steps: int, length: int | None = None) -> float:
        """Tokens per second with `length` drafts for every slot, or as many as the budget chooses."""
        tokens = seconds = 0.0
        for _ in range(num_steps):
            counts = self.plan() if length is None else np.full(self.num, length)
            won, took = self.step(counts)
            tokens, seconds = tokens + won, seconds + took
        return tokens / seconds


HOPELESS: dict[str, dict[str, Any]] = {
    "dear rows": {"rates": [0.3] * 64, "per_token": 0.1},
    "dear drafter": {"rates": [0.8] * 16, "drafter": (0.8, 0.03)},
    "wrong drafts": {"rates": [0.02] * 4, "per_token": 0.02},
    "wrong drafter": {"rates": [0.1] * 16, "drafter": (0.2, 0.01)},
}
"""Where no number of drafts pays."""

WORTHWHILE: dict[str, dict[str, Any]] = {
    "one slot": {"rates": [0.8]},
    "cheap rows": {"rates": [0.8] * 16, "per_token": 0.01},
    "rows that are free at first": {"rates": [0.8] * 64, "per_token": 0.02, "free": 200},
    "a small drafter": {"rates": [0.8], "drafter": (0.1, 0.01)},
    "a small drafter in a batch": {"rates": [0.9] * 16, "per_token": 0.01, "drafter": (0.1, 0.002)},
}
"""Where drafting pays."""

MIXED: dict[str, dict[str, Any]] = {
    "four slots of sixteen accept": {"rates": [0.95] * 4 + [0.05] * 12, "per_token": 0.04},
    "half of the slots accept twice as often": {"rates": [0.9] * 8 + [0.4] * 8, "per_token": 0.04},
}
"""Where slots differ."""
