"""A kernel that draws gets what it needs: with its torch reference in its place, outcomes are those of torch's operations."""

import pytest

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Notes
from draftmill.decoders.engine.fields import NoiseField
from draftmill.decoders.engine.kernel_notes import can_tell
from draftmill.decoders.engine.rings import NoiseRing
from draftmill.decoders.kernels import choice_reference, notes_reference
from tests.decoders.kernels.decoding import BLOCKS, CASES, MASKED, TORCH, Kernels, assert_equal, decoded, scored
from tests.decoders.support import texts

# Log-probabilities are computed from the logits every time, where torch's operations read them from the warped distribution.
ROUNDING = 1e-5
DRAWS = Kernels(choice=choice_reference)
NOTES = Kernels(note=notes_reference.note)


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


@pytest.mark.parametrize("warp", ["plain", "greedy", "all"])
@pytest.mark.parametrize("name", MASKED)
def test_picks_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp) for kernels in (NOTES, TORCH))
    assert_equal(found, expected, rounding=0.0)


@pytest.mark.parametrize("name", ["ssd, cached", "ancestral, euler"])
def test_samples_of_masked_diffusion_may_have_settings_of_their_own(name):
    found, expected = (decoded(name, kernels, warp="all", own=True) for kernels in (NOTES, TORCH))
    assert_equal(found, expected, rounding=0.0)


def test_a_kernel_that_draws_picks_needs_no_noise_in_memory(monkeypatch):
    def refused(*_):
        raise AssertionError("noise is kept, or read")

    for name in ("missing", "rows"):
        monkeypatch.setattr(NoiseField, name, refused)
    decoded("ssd", NOTES, warp="plain")
    with pytest.raises(AssertionError, match="noise is kept"):
        decoded("ssd", TORCH, warp="plain")


@pytest.mark.parametrize("name", ["stepwise, top1", "stepwise, random", "ancestral, analytic"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_wrong_token_and_a_wrong_note_change_a_text(name, row):
    def wrong(*args, **more):
        found = notes_reference.note(*args, **more)
        found[row] = 11 if row == 0 else found[row].flip(0)
        return found

    found, expected = (decoded(name, kernels, warp="plain") for kernels in (Kernels(note=wrong), TORCH))
    assert texts(found) != texts(expected)


@pytest.mark.parametrize(
    ("name", "warp"),
    [
        *((name, "all") for name in BLOCKS),
        ("block_diffusion", "plain"),
        ("s2d2, margin", "greedy"),
        ("s2d2, fused", "greedy"),
    ],
)
def test_what_named_rows_are_told_is_told_without_a_kernel(name, warp, monkeypatch):
    expected = decoded(name, TORCH, warp=warp)
    monkeypatch.setattr(NoiseRing, "use", None)
    assert_equal(decoded(name, NOTES, warp=warp), expected, rounding=ROUNDING)


def test_the_kernel_tells_of_one_distribution_and_of_coupled_draws():
    worth = Notes(worth=("margin", 0.1))
    assert can_tell(Sampling(top_p=0.5), worth) and can_tell(Sampling(temperature=0.0), worth)
    assert can_tell(Sampling(temperature=0.0, top_k=3), Notes(entropy=True))
    assert not can_tell(Sampling(temperature=0.0, top_k=3), worth)
    assert not can_tell(Sampling(acceptance="rejection"), Notes())
    assert not can_tell(Sampling(), Notes(by_ratio=True))
    assert can_tell(Sampling(temperature=0.0, acceptance="rejection"), Notes())


@pytest.mark.parametrize(("name", "row"), [("block_diffusion", 0), ("block_diffusion, entropy", 3), ("s2d2, renyi", 3)])
def test_a_wrong_token_and_a_wrong_note_of_a_named_row_are_found(name, row):
    def wrong(*args, **more):
        found = notes_reference.note(*args, **more)
        found[row] = 11 if row == 0 else 0.0
        return found

    found, expected = (decoded(name, kernels, warp="all") for kernels in (Kernels(note=wrong), TORCH))
    with pytest.raises(AssertionError):
        assert_equal(found, expected, rounding=ROUNDING)
