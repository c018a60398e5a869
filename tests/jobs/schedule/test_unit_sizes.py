"""Sizes of units in columns: they behave like a dict."""

import random

import pytest

from draftmill.jobs.schedule.units import UnitSize, UnitSizes


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
