"""The budget of drafts in worlds whose costs and acceptances are known: no clock, no model."""

import itertools

import numpy as np
import pytest

from benchmarks.budget_worlds import HOPELESS, MIXED, MOST, WORTHWHILE, World
from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.cost import CostTable


@pytest.mark.parametrize("case", HOPELESS)
def test_where_drafting_does_not_pay_little_is_lost_on_it(case):
    plain, auto = World(**HOPELESS[case]).run(400, 0), World(**HOPELESS[case]).run(400)
    assert auto > 0.975 * plain


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", WORTHWHILE)
def test_where_drafting_pays_it_is_nearly_as_fast_as_the_best_fixed_length(case):
    fixed = [World(**WORTHWHILE[case]).run(200, length) for length in (0, 1, 2, 3, 4, 6, 8, 12, 16)]
    auto = World(**WORTHWHILE[case]).run(600)
    assert auto > 1.15 * fixed[0]
    assert auto > 0.9 * max(fixed)


def test_drafts_go_to_the_slots_that_accept_them():
    world = World(**MIXED["four slots of sixteen accept"])
    world.run(60)
    counts = np.mean([world.plan() for _ in range(20)], axis=0)
    assert counts[:4].mean() > 3 and counts[4:].mean() < 0.5
    fixed = [World(world.rates, per_token=0.04).run(200, length) for length in range(9)]
    assert World(world.rates, per_token=0.04).run(400) > 1.1 * max(fixed)


def test_drafting_comes_back_when_it_begins_to_pay():
    world = World([0.02] * 8, per_token=0.02)
    world.run(100)
    assert np.mean([world.plan().mean() for _ in range(16)]) < 0.3
    world.rates[:] = 0.9
    world.run(300)
    assert np.mean([world.plan().mean() for _ in range(8)]) > 2


def test_a_step_is_at_most_twice_as_large_as_any_before():
    world, largest = World([0.9] * 64, per_token=0.0001), 0
    for _ in range(40):
        counts = world.plan()
        size = world.num + counts.sum()
        assert size <= max(2.05 * largest, 2 * world.num)
        largest = max(largest, size)
        world.step(counts)
    assert largest > 500


def test_the_choice_is_close_to_the_best_of_all_allocations():
    world = World([0.9, 0.6, 0.2], per_token=0.15)
    for _ in range(200):
        world.step(world.rng.integers(0, 5, world.num))
    survival = world.budget.survival.probabilities(world.slots)

    def rate(counts):
        gain = sum(1 + survival[slot, :count].sum() for slot, count in enumerate(counts))
        return gain / world.seconds(np.array(counts))[0]

    world.budget._num_planned = 1000
    found = world.plan(most=4)
    best = max(itertools.product(range(5), repeat=3), key=rate)
    assert rate(found) > 0.97 * rate(best)
    assert rate(found) > 1.05 * rate((0, 0, 0)) and rate(found) > 1.02 * rate((4, 4, 4))


def test_no_slot_gets_more_than_it_has_room_for():
    world = World([0.99] * 4, per_token=0.0)
    world.run(60)
    most = np.array([0, 1, 3, 40])
    for _ in range(20):
        counts = world.budget.plan(world.slots, most, kv_tokens=10, fresh=False)
        assert (counts <= most).all() and int(counts.max()) <= MOST


def test_a_fresh_slot_is_not_drafted_for_while_many_others_wait():
    world = World([0.9] * 64, per_token=0.002, drafter=(0.2, 0.002))
    assert world.plan(fresh=True).sum() == 0, "nothing is known yet"
    world.run(200)
    one = world.budget.plan(np.array([5]), np.array([MOST]), kv_tokens=100, fresh=True)
    assert one.tolist() == [0]
    assert world.plan(fresh=True).mean() > 1


def test_windows_of_two_forwards_are_chosen_where_rows_are_cheap():
    # ASSD: a draft forward and a verification for e > 0, the first of the e extra tokens for certain.
    def lengths(per_row):
        rows = [2, *[3 * e + 2 for e in range(1, 8)]]
        budget = DraftBudget(8, 7, rows=rows, forwards=[1] + [2] * 7)
        rng, slots = np.random.default_rng(0), np.arange(8)
        chosen = []
        for _ in range(200):
            counts = budget.plan(slots, np.full(8, 7), kv_tokens=0, fresh=False)
            size = int(sum(rows[e] / (2 if e else 1) for e in counts))
            budget.note_step(size, 0, 1 + per_row * size)
            gained = np.minimum(1 + (rng.random((8, 7)) < 0.9).cumprod(1).sum(1), counts)
            budget.learn(slots, counts, gained)
            chosen.append(counts.mean())
        return np.mean(chosen[50:])

    assert lengths(per_row=0.001) > 4
    # At the same number of forwards per token, a window's rows are three times those of one token: never worth it.
    assert lengths(per_row=10.0) < 0.2


# ---- the cost table ----------------------------------------------------------------------------------------------


def observed(forwards):
    table = CostTable()
    for tokens, kv, seconds in forwards:
        table.observe(tokens, kv, seconds)
    return table.cost()


def test_a_line_is_found_again():
    rng = np.random.default_rng(0)
    sizes = [(int(tokens), int(kv)) for tokens, kv in zip(rng.integers(1, 300, 200), rng.integers(0, 9000, 200))]  # noqa: B905
    cost = observed([(t, kv, 2.0 + 0.03 * t + 0.0005 * kv) for t, kv in sizes])
    assert (cost.base, cost.per_token, cost.per_kv_token) == pytest.approx((2.0, 0.03, 0.0005), rel=0.15)
    wanted = np.array([10.0, 100.0, 280.0, 400.0])
    assert cost.seconds(wanted, 4000) == pytest.approx(4.0 + 0.03 * wanted, rel=0.08)


def test_what_is_free_at_first_stays_free_where_it_was_seen():
    cost = observed([(t, 0, max(1.0, t / 200)) for t in (50, 50, 100, 150, 200, 300, 400, 800) for _ in range(9)])
    found = cost.seconds(np.array([50.0, 150.0, 400.0]), 0)
    assert found == pytest.approx([1.0, 1.0, 2.0], rel=0.15)


def test_one_held_up_forward_changes_little_and_none_makes_more_cheaper():
    forwards = [(t, 0, 1.0 + 0.01 * t) for t in (10, 20, 40) for _ in range(10)]
    calm, shaken = observed(forwards), observed([*forwards, (40, 0, 100.0)])
    sizes = np.array([10.0, 20.0, 40.0])
    assert shaken.seconds(sizes, 0) == pytest.approx(calm.seconds(sizes, 0), rel=0.2)
    falling = observed([(t, 0, 2.0 - 0.02 * t) for t in (10, 20, 40) for _ in range(10)])
    assert (np.diff(falling.seconds(np.arange(1.0, 100.0), 0)) >= 0).all()


def test_nothing_is_known_before_the_second_forward():
    assert observed([(4, 0, 9.0)]) is None
    cost = observed([(4, 0, 9.0), (4, 0, 1.0)])
    assert cost.seconds(np.array([4.0]), 0) == pytest.approx([1.0])
