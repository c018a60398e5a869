"""Whole decodes with the kernels in the interpreter: the texts, counters and log-probabilities of torch's operations."""

import pytest

from decoders.kernels import choice
from tests.decoders.kernels.decoding import assert_equal, decoded


@pytest.mark.parametrize(
    ("name", "warp", "acceptance", "own"),
    [
        ("look-up", "plain", "coupled", True),
        ("assd, fused chain", "all", "coupled", False),
        ("model", "all", "rejection", False),
    ],
)
def test_drawn_texts_are_those_of_torch(name, warp, acceptance, own):
    found, expected = (
        decoded(name, one, warp=warp, acceptance=acceptance, own=own, count=2, new=4) for one in (choice, None)
    )
    assert_equal(found, expected, rounding=1e-4)
