"""Units hold every row once, in few bounds; ids that occur twice are found in any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.makespans import makespan_bound, refill_makespan, static_makespan
from jobs.plan.duplicates import DuplicateFinder
from jobs.plan.packing import auto_unit_rows, cut, longest_first, padding_efficiency


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=60), max_rows=st.integers(1, 20), max_tokens=st.integers(1, 120))
def test_units_cover_every_row_once_within_their_bounds(lengths: list[int], max_rows: int, max_tokens: int) -> None:
    ordered = np.sort(np.asarray(lengths, dtype=np.int32))[::-1]
    units = cut(ordered, max_rows=max_rows, max_tokens=max_tokens)
    assert [start for start, _ in units] + [len(lengths)] == [0] + [end for _, end in units] if lengths else units == []
    for start, end in units:
        assert end - start <= max_rows
        assert end - start == 1 or ordered[start:end].sum() <= max_tokens


def test_shares_are_even() -> None:
    assert cut(np.ones(10, dtype=np.int32), max_rows=4) == [(0, 4), (4, 8), (8, 10)]
    assert cut(np.ones(1025, dtype=np.int32), max_rows=1024) == [(0, 513), (513, 1025)]


def test_longest_first_keeps_the_order_of_equals() -> None:
    assert longest_first(np.asarray([3, 5, 3, 5], dtype=np.int32)).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("rows", "unit_rows"), [(1, 32), (500, 32), (2048, 32), (6400, 100), (65536, 1024), (10**7, 1024)]
)
def test_automatic_unit_rows_are_clamped(rows: int, unit_rows: int) -> None:
    assert auto_unit_rows(rows) == unit_rows


def test_padding_is_computed_per_batch() -> None:
    lengths = np.asarray([4, 2, 1, 1], dtype=np.int32)
    assert padding_efficiency(lengths, batch_rows=2) == 8 / 10
    assert padding_efficiency(lengths, batch_rows=4) == 8 / 16
    assert padding_efficiency(np.zeros(0, dtype=np.int32), batch_rows=4) == 1.0


def test_sorting_and_refill_approach_the_bound() -> None:
    costs = np.random.default_rng(0).lognormal(4.0, 0.8, 2000).tolist()
    ordered = sorted(costs, reverse=True)
    bound = makespan_bound(costs, 16)
    assert bound <= refill_makespan(ordered, 16) <= refill_makespan(costs, 16) <= static_makespan(costs, 16)
    assert refill_makespan(ordered, 16) / bound < 1.01


@pytest.mark.parametrize("held_rows", [1, 7, 10_000])
def test_an_id_that_occurs_twice_is_found_with_both_places(held_rows: int) -> None:
    ids = [f"id-{number}" for number in range(1000)]
    with DuplicateFinder(held_rows=held_rows) as finder:
        for start in range(0, 1000, 50):
            finder.add(ids[start : start + 50], np.zeros(50, dtype=np.int32), np.arange(start, start + 50))
        assert finder.first() is None
        finder.add(["new", "id-700", "id-3"], np.ones(3, dtype=np.int32), np.asarray([0, 1, 2]))
        assert finder.first() == ((0, 700), (1, 1))
