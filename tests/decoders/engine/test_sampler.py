"""A kernel that samples gets what it needs: with its torch reference in its place, outcomes are those without a kernel."""

import pytest

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.sampling import sample
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.noise_cache import NoiseCache
from draftmill.decoders.registry import algorithm_of
from tests.decoders.kernels.decoding import (
    BLOCKS,
    CASES,
    MASKED,
    TORCH,
    Kernels,
    assert_equal,
    decoded,
    scored,
    setup_for,
)
from tests.decoders.support import texts

# Log-probabilities are computed from the logits every time, where torch's operations read them from the warped distribution.
ROUNDING = 1e-5
REFERENCE = Kernels(sample=sample)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("name", "warp"),
    [*((name, "all") for name in CASES), *((name, warp) for name in ("model", "assd") for warp in ("plain", "greedy"))],
)
def test_outcomes_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)
    assert len({tuple(text) for text in texts(found).values()}) > 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["autoregressive", "model", "assd"])
def test_requests_may_have_settings_of_their_own(name):
    found, expected = (decoded(name, kernels, warp="all", own=True) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "warp"),
    [("look-up", "plain"), ("look-up", "greedy"), ("look-up", "all"), ("model", "all"), ("assd", "all")],
)
def test_ratios_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp, acceptance="rejection") for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_given_tokens_are_scored(name):
    found, expected = (scored(name, kernels) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.one_in(17)
@pytest.mark.parametrize("warp", ["plain", "greedy", "all"])
@pytest.mark.parametrize("name", MASKED)
def test_picks_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=0.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["ssd, cached", "ancestral, euler"])
def test_samples_of_masked_diffusion_may_have_settings_of_their_own(name):
    found, expected = (decoded(name, kernels, warp="all", own=True) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=0.0)


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("name", "warp"),
    [
        *((name, "all") for name in BLOCKS),
        ("block_diffusion", "plain"),
        ("s2d2, margin", "greedy"),
        ("s2d2, fused", "greedy"),
    ],
)
def test_blocks_are_those_without_a_kernel(name, warp):
    found, expected = (decoded(name, kernels, warp=warp) for kernels in (REFERENCE, TORCH))
    assert_equal(found, expected, rounding=ROUNDING)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["model", "ssd", "s2d2"])
def test_noise_is_kept_for_torch_alone(name, monkeypatch):
    """A kernel computes its own; so does torch on a device, where nothing is kept either."""

    asked = list[bool]()

    def counted(*given, gumbels=None, **more):
        asked.append(gumbels is not None)
        return sample(*given, gumbels=gumbels, **more)

    decoded(name, Kernels(sample=counted), warp="plain")
    assert asked and not any(asked)
    monkeypatch.setattr(NoiseCache, "rows", None)
    with pytest.raises(TypeError):
        decoded(name, TORCH, warp="plain")


def has_kernel(name, **settings):
    """Whether a decoder with these sampling settings would use a kernel."""
    setup, decoder = setup_for(name, TORCH, Sampling(**settings))
    algorithm: Algorithm = algorithm_of(setup, decoder)
    return Engine(setup, algorithm).sampler.kernel is not None


def test_a_kernel_tells_of_one_distribution_and_of_coupled_draws(monkeypatch):
    monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: sample)
    measured = "s2d2, margin"
    assert has_kernel(measured, top_p=0.5) and has_kernel(measured, temperature=0.0)
    assert not has_kernel(measured, temperature=0.0, top_k=3), "its measure is of another distribution"
    assert has_kernel("block_diffusion", temperature=0.0, top_k=3)
    assert not has_kernel(measured, acceptance="rejection"), "notes of a draft that is judged"
    assert has_kernel(measured, temperature=0.0, acceptance="rejection")
    assert has_kernel("model", acceptance="rejection"), "drafts may be looked up, and scores have no draft"
