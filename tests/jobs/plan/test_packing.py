"""Units hold every row once, in few bounds; ids that occur twice are found in any number of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.makespans import makespan_bound, refill_makespan, static_makespan
from draftmill.jobs.plan.id_sets import DuplicateFinder, hashes_of
from draftmill.jobs.plan.packing import auto_unit_rows, cut, longest_first, padding_efficiency


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=60), max_rows=st.integers(1, 20), max_tokens=st.integers(1, 120))
def test_units_cover_every_row_once_within_their_bounds(lengths, max_rows, max_tokens):
    ordered = np.sort(np.asarray(lengths, dtype=np.int32))[::-1]
    units = cut(ordered, max_rows=max_rows, max_tokens=max_tokens)
    assert [start for start, _ in units] + [len(lengths)] == [0] + [end for _, end in units] if lengths else units == []
    for start, end in units:
        assert end - start <= max_rows
        assert end - start == 1 or ordered[start:end].sum() <= max_tokens


def test_shares_are_even():
    assert cut(np.ones(10, dtype=np.int32), max_rows=4) == [(0, 4), (4, 8), (8, 10)]
    assert cut(np.ones(1025, dtype=np.int32), max_rows=1024) == [(0, 513), (513, 1025)]


def test_a_unit_has_as_many_tokens_as_its_limit_and_no_more():
    lengths = np.array([5, 5, 5, 5], dtype=np.int32)
    assert cut(lengths, max_rows=9, max_tokens=10) == [(0, 2), (2, 4)]
    assert cut(lengths, max_rows=9, max_tokens=9) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=60),
    max_rows=st.integers(1, 20),
    max_tokens=st.integers(1, 120),
)
def test_units_that_end_with_groups_keep_their_bounds(rows, max_rows, max_tokens):
    lengths, depth = (np.asarray([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
    units = cut(lengths.astype(np.int32), max_rows=max_rows, max_tokens=max_tokens, depth=depth)
    assert [number for start, end in units for number in range(start, end)] == list(range(len(rows)))
    for start, end in units:
        assert 0 < end - start <= max_rows
        assert end - start == 1 or lengths[start:end].sum() <= max_tokens


def test_a_unit_ends_with_a_group_if_one_ends_shortly_before_its_limit():
    ones = np.ones(96, dtype=np.int32)
    questions = np.tile([0, 1, 1], 32)
    # In even shares it would be 32, 64, 96; what is left after 30 is shared evenly again.
    assert cut(ones, max_rows=32, depth=questions) == [(0, 30), (30, 51), (51, 72), (72, 96)]
    # No question ends in the eighth before the limit: it is cut in two.
    assert cut(ones[:16], max_rows=8, depth=np.tile([0, 1, 1, 1, 1, 1], 3)[:16]) == [(0, 8), (8, 16)]
    # Of several ends, that of the outermost group; without groups, as ever.
    tasks = np.where(np.arange(96) % 29 == 0, 0, np.tile([1, 2], 48))
    assert cut(ones, max_rows=32, depth=tasks)[0] == (0, 29)
    assert cut(ones, max_rows=40, depth=np.zeros(96, dtype=np.int64)) == cut(ones, max_rows=40)


def test_longest_first_keeps_the_order_of_equals():
    assert longest_first(np.asarray([3, 5, 3, 5], dtype=np.int32)).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("rows", "unit_rows"), [(1, 32), (500, 32), (2048, 32), (6400, 100), (65536, 1024), (10**7, 1024)]
)
def test_automatic_unit_rows_are_clamped(rows, unit_rows):
    assert auto_unit_rows(rows) == unit_rows


def test_padding_is_computed_per_batch():
    lengths = np.asarray([4, 2, 1, 1], dtype=np.int32)
    assert padding_efficiency(lengths, batch_rows=2) == 8 / 10
    assert padding_efficiency(lengths, batch_rows=4) == 8 / 16
    assert padding_efficiency(np.zeros(0, dtype=np.int32), batch_rows=4) == 1.0


def test_sorting_and_refill_approach_the_bound():
    costs = np.random.default_rng(0).lognormal(4.0, 0.8, 2000).tolist()
    ordered = sorted(costs, reverse=True)
    bound = makespan_bound(costs, 16)
    assert bound <= refill_makespan(ordered, 16) <= refill_makespan(costs, 16) <= static_makespan(costs, 16)
    assert refill_makespan(ordered, 16) / bound < 1.01


@pytest.mark.parametrize("held_rows", [1, 7, 10_000])
def test_an_id_that_occurs_twice_is_found_with_both_places(held_rows):
    ids = [f"id-{number}" for number in range(1000)]
    with DuplicateFinder(held_rows=held_rows) as finder:
        for start in range(0, 1000, 50):
            finder.add(hashes_of(ids[start : start + 50]), np.zeros(50, dtype=np.int32), np.arange(start, start + 50))
        assert finder.first() is None
        finder.add(hashes_of(["new", "id-700", "id-3"]), np.ones(3, dtype=np.int32), np.asarray([0, 1, 2]))
        assert finder.first() == ((0, 700), (1, 1))
