"""The budget of drafts where a diffusion model drafts, in worlds whose costs are known: few forwards, and a head's places."""

from typing import Any

import numpy as np
import pytest

from benchmarks.budget_worlds import MOST, World
from draftmill.decoders.causal.specdiff import num_forwards
from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.cost import CostTable


class DiffusionWorld(World):
    """Every draft is revealed in at most `steps` forwards over all of them; a head takes its time for each place, one by one."""

    def __init__(self, rates, *, steps=1, forward=(0.3, 0.002), head=(0.0, 0.0), told=True, **costs):
        super().__init__(rates, **costs)
        self.steps, self.forward, self.head = steps, forward, head
        self.draft_costs = CostTable()
        forwards = num_forwards(steps, MOST)
        self.budget = DraftBudget(
            self.num,
            MOST,
            drafter=self.draft_costs,
            draft_forwards=forwards,
        )
        self.drawing = self.budget.drawing if told else CostTable()

    def seconds(self, counts):
        """(of the target's forward, of each of the drafter's)."""
        target, _ = super().seconds(counts)
        most, total = counts.max(initial=0), counts.sum()
        num_forwards = -(-most // -(-most // self.steps)) if most else 0
        return target, [(total, self.forward[0] + self.forward[1] * total)] * num_forwards

    def step(self, counts):
        tokens, seconds = super().step(counts)
        most, total = int(counts.max(initial=0)), int(counts.sum())
        places = self.head[0] * most + self.head[1] * total
        if places:
            took = self.noisy(places)
            self.drawing.observe(most, total, took)
            self.budget.spend(took)
        return tokens, seconds + places


HOPELESS: dict[str, dict[str, Any]] = {
    "dear forwards": {"rates": [0.8] * 16, "forward": (3.0, 0.01)},
    "wrong drafts": {"rates": [0.1] * 16, "head": (0.02, 0.001)},
    "dear places": {"rates": [0.8] * 8, "head": (0.6, 0.01)},
    "dear places in two forwards": {"rates": [0.7] * 8, "steps": 2, "head": (0.5, 0.01)},
}


@pytest.mark.parametrize("case", HOPELESS)
def test_where_drafting_does_not_pay_little_is_lost_on_it(case):
    plain, auto = DiffusionWorld(**HOPELESS[case]).run(400, 0), DiffusionWorld(**HOPELESS[case]).run(400)
    assert auto > 0.975 * plain


WORTHWHILE: dict[str, dict[str, Any]] = {
    "one slot": {"rates": [0.8], "head": (0.02, 0.001)},
    "a batch": {"rates": [0.85] * 16, "per_token": 0.01, "head": (0.02, 0.001)},
    "two forwards": {"rates": [0.85] * 4, "steps": 2, "per_token": 0.01, "head": (0.02, 0.001)},
    "places that make short drafts best": {"rates": [0.9] * 4, "per_token": 0.01, "head": (0.15, 0.001)},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", WORTHWHILE)
def test_where_drafting_pays_it_is_nearly_as_fast_as_the_best_fixed_length(case):
    fixed = [DiffusionWorld(**WORTHWHILE[case]).run(200, length) for length in (0, 1, 2, 3, 4, 6, 8, 12, 16)]
    auto = DiffusionWorld(**WORTHWHILE[case]).run(600)
    assert auto > 1.15 * fixed[0]
    assert auto > 0.9 * max(fixed)


def test_the_places_of_a_head_make_drafts_shorter():
    def length(told):
        world = DiffusionWorld([0.9] * 4, per_token=0.01, head=(0.15, 0.001), told=told)
        world.run(200)
        return np.mean([world.plan().mean() for _ in range(20)])

    assert length(told=True) < 0.8 * length(told=False)
