"""A kernel that draws gets what it needs: with its torch reference in its place, outcomes are those of torch's operations."""

import pytest

from decoders.kernels import choice_reference
from tests.decoders.kernels.decoding import CASES, TORCH, Kernels, assert_equal, decoded, scored
from tests.decoders.support import texts

# Log-probabilities are computed from the logits every time, where torch's operations read them from the warped distribution.
ROUNDING = 1e-5
DRAWS = Kernels(choice=choice_reference)


@pytest.mark.parametrize(
    ("name", "warp"),
    [*((name, "all") for name in CASES), *((name, warp) for name in ("model", "assd") for warp in ("plain", "greedy"))],
)
def test_outcomes_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp) for kernels in (DRAWS, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)
    assert len({tuple(text) for text in texts(found).values()}) > 1


@pytest.mark.parametrize("name", ["autoregressive", "model", "assd"])
def test_requests_may_have_settings_of_their_own(name):
    found, expected = (decoded(name, kernels, warp="all", own=True) for kernels in (DRAWS, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.parametrize(
    ("name", "warp"),
    [("look-up", "plain"), ("look-up", "greedy"), ("look-up", "all"), ("model", "all"), ("assd", "all")],
)
def test_ratios_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp, acceptance="rejection") for kernels in (DRAWS, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_given_tokens_are_scored(name):
    found, expected = (scored(name, kernels) for kernels in (DRAWS, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)
