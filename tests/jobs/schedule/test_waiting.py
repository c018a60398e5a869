"""The order in which units are assigned: neighbours in the inputs together, no long unit at the end; their sizes in columns."""

import random
from itertools import pairwise

import pytest

from benchmarks.makespans import makespan_bound, refill_makespan
from draftmill.jobs.schedule.units import LAST_UNITS, UnitSize, UnitSizes, WaitingUnits, first_of_last
from tests.jobs.schedule.integrity import waiting_units


def windows(*tokens: list[int]) -> list[UnitSize]:
    """Units of windows, numbered through."""
    found: list[UnitSize] = []
    for window, lengths in enumerate(tokens):
        found += [UnitSize(len(found) + n, 1, length, window) for n, length in enumerate(lengths)]
    return found


def dealt(units: list[UnitSize], workers: int) -> list[int]:
    waiting = WaitingUnits(UnitSizes(units), set(), workers)
    return [unit for _ in units if (unit := waiting.take()) is not None]


def test_windows_come_one_after_the_other_and_the_last_ones_as_one():
    units = windows([9, 5], [7, 8], [3, 6] * LAST_UNITS, [1])
    in_the_end = sorted(units[4:], key=lambda size: (-size.tokens, size.unit))
    assert dealt(units, workers=2) == [0, 1, 2, 3, *(size.unit for size in in_the_end)]


def test_with_few_units_for_each_worker_the_longest_of_all_come_first():
    units = windows([9, 5], [7, 8], [3, 6])
    assert dealt(units, workers=1) == [0, 3, 2, 5, 1, 4]


def test_nowhere_but_at_the_end_does_a_long_unit_follow_a_short_one():
    rng = random.Random(0)
    units = windows(*([100 + n + rng.randint(0, 3) for n in range(0, 400, 10)] for _ in range(20)))
    tokens = [units[number].tokens for number in dealt(units, workers=4)]
    assert max(abs(after - before) for before, after in pairwise(tokens)) < 20


def test_units_that_are_done_are_passed_over_and_those_that_come_back_have_their_turn():
    done: set[int] = set()
    units = windows(*([5, 4, 3] for _ in range(9)))
    waiting = WaitingUnits(UnitSizes(units), done, workers=1)
    assert [waiting.take() for _ in range(4)] == [0, 1, 2, 5]
    done |= {4}
    waiting.put(units[1])
    assert [waiting.take() for _ in range(3)] == [1, 3, 6]
    done |= set(range(27))
    assert not waiting and waiting.take() is None and waiting_units(waiting) == []


@pytest.mark.parametrize(("wanted", "first"), [(1, 2), (2, 1), (3, 1), (4, 0), (99, 0)])
def test_the_last_windows_are_as_many_as_it_takes(wanted, first):
    assert first_of_last([0, 0, 1, 1, 2], wanted) == first


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
@pytest.mark.parametrize("last", [1, 5, 64])
def test_the_end_of_a_job_is_as_good_as_if_the_longest_of_all_had_come_first(workers, last):
    rng = random.Random(workers * 100 + last)
    tokens = [sorted((rng.randint(10, 1000) for _ in range(64)), reverse=True) for _ in range(40)]
    units = windows(*tokens[:-1], [1000, *tokens[-1][: last - 1]])  # the last window may be short, and of long ones
    costs = [float(units[number].tokens) for number in dealt(units, workers)]
    assert refill_makespan(costs, workers) <= 1.02 * makespan_bound(costs, workers)


def test_sizes_are_a_mapping_in_the_order_of_the_units():
    rng = random.Random(0)
    sizes = [UnitSize(unit, rng.randint(1, 9), rng.getrandbits(40), rng.randint(0, 5)) for unit in range(0, 999, 3)]
    plain = {size.unit: size for size in sizes}
    for order in (sizes, rng.sample(sizes, len(sizes))):
        found = UnitSizes(order)
        assert dict(found) == plain and list(found) == sorted(plain) and len(found) == len(plain)
        assert found.rows == sum(size.rows for size in sizes)
        assert 1 not in found and -3 not in found and found.get(10**6) is None
    with pytest.raises(KeyError):
        UnitSizes(sizes)[1]
    with pytest.raises(AssertionError):
        UnitSizes([sizes[0], sizes[0]])
