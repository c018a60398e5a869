"""The choice of a block size: it finds the fastest one, stays near no drafts where they don't pay, and follows the batch."""

from collections import Counter

import numpy as np
import pytest

from draftmill.decoders.engine.jacobi_size import MOST_AUTO, SIZES, JacobiSizes


def simulate(budget, steps, *, gain, seconds, num_slots=8, seed=0):
    """Play steps in which blocks of n win `gain(n)` tokens a slot, noisily, and rows take `seconds(rows)`; sizes chosen."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(steps):
        size = budget.choose(num_slots, 1000)
        tokens = num_slots + rng.poisson(num_slots * (gain(size) - 1))
        rows = num_slots * (1 + size)
        budget.observe(num_slots, rows, 1000, tokens=int(tokens), seconds=seconds(rows) * rng.uniform(0.95, 1.05))
        chosen.append(size)
    return chosen


def share_of(chosen, size):
    return Counter(chosen[100:])[size] / len(chosen[100:])


def saturating(most, half):
    return lambda size: 1 + (most - 1) * size / (size + half)


@pytest.mark.parametrize(
    ("gain", "seconds"),
    [
        (saturating(6, 8), lambda rows: 1.0 + 0.01 * rows),
        (saturating(6, 8), lambda rows: 1.0 + 0.1 * rows),
        (saturating(3, 2), lambda rows: 1.0 if rows < 100 else rows / 100),
        (saturating(10, 32), lambda rows: 1.0),
    ],
)
def test_it_settles_on_the_fastest_size(gain, seconds):
    best = max(gain(size) / seconds(8 * (1 + size)) for size in SIZES)
    chosen = simulate(JacobiSizes(), 1000, gain=gain, seconds=seconds)[60:]
    rate = sum(gain(size) for size in chosen) / sum(seconds(8 * (1 + size)) for size in chosen)
    # None at all counts a little more than its rate, and trials take their share.
    assert rate >= 0.94 * best


def test_where_no_draft_comes_true_next_to_nothing_is_drafted():
    chosen = simulate(JacobiSizes(), 2000, gain=lambda size: 1.0 + 0.02 * (size > 0), seconds=lambda rows: rows)
    assert share_of(chosen, 0) > 0.97
    # It is tried again now and then, or a change would never be seen.
    assert any(chosen[500:])


def test_it_follows_the_number_of_slots_and_a_change_of_the_text():
    def seconds(rows):
        return 1.0 if rows <= 40 else rows / 40

    budget = JacobiSizes()
    few = simulate(budget, 400, gain=saturating(8, 8), seconds=seconds, num_slots=1)
    many = simulate(budget, 200, gain=saturating(8, 8), seconds=seconds, num_slots=40)
    assert Counter(few[100:]).most_common(1)[0][0] >= 16
    assert Counter(many[20:]).most_common(1)[0][0] == 0
    later = simulate(budget, 4000, gain=saturating(30, 1), seconds=seconds, num_slots=4)
    assert Counter(later[-500:]).most_common(1)[0][0] == 8


def test_sizes_are_within_bounds():
    assert max(SIZES) == MOST_AUTO
    assert set(simulate(JacobiSizes(), 300, gain=saturating(40, 8), seconds=lambda rows: 1.0)) <= set(SIZES)
