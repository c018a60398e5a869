"""Scorers: every decoder's settings find theirs, and masks of scores have the weights of their definition."""

import itertools
from pkgutil import resolve_name
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from draftmill.actors.loop.loading import most_canvases
from draftmill.actors.task import Score
from draftmill.decoders.base import ModelKind
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.draws.keys import SCORE_MASK, SCORE_SHARE, uniforms
from draftmill.decoders.estimates import MaskedGroup
from draftmill.decoders.settings import DECODERS, DecoderSettings, scorer_of


def group_of(length, *, kind="llada", samples=8, key=5, number=0):
    return MaskedGroup(key, number, np.arange(length), kind, samples)


def weights_by_definition(length):
    """The expected weight of each mask under LLaDA's estimator: l is uniform, then the mask, then L / l."""
    subsets = [mask for mask in itertools.product([False, True], repeat=length) if any(mask)]
    alike = {count: sum(sum(mask) == count for mask in subsets) for count in range(1, length + 1)}
    return {mask: 1 / length / alike[sum(mask)] * length / sum(mask) for mask in subsets}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_short_text_has_every_mask_once_with_its_weight(length):
    group = group_of(length, samples=32)
    assert group.enumerated and group.num_masks == 2**length - 1
    masks = [group.mask(draw) for draw in range(group.num_masks)]
    found = {tuple(mask.hidden_L.tolist()): mask.weight for mask in masks}
    assert found == pytest.approx(weights_by_definition(length))


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["llada", "mdlm"])
def test_every_token_has_weight_one_on_the_average(kind):
    # Each token's expected weight is 1 under both; 400 keys of 16 draws. The tolerance is six standard errors or more.
    length = 6
    total = np.zeros(length)
    for key in range(400):
        group = group_of(length, kind=kind, samples=16, key=key)
        for draw in range(16):
            mask = group.mask(draw)
            total += mask.hidden_L * mask.weight
    np.testing.assert_allclose(total / 400, 1.0, atol=0.15)


@pytest.mark.parametrize("kind", ["llada", "mdlm"])
def test_a_pair_of_draws_has_its_own_part_of_the_range(kind):
    group = group_of(1000, kind=kind, samples=10)
    for draw in range(10):
        mask = group.mask(draw)
        low, high = draw // 2 / 5, (draw // 2 + 1) / 5
        assert low <= mask.share <= high + 1e-3
        if kind == "llada":
            assert mask.hidden_L.sum() == round(mask.share * 1000)
            assert mask.weight * 10 == pytest.approx(1 / mask.share)
        else:
            assert mask.weight * 10 == pytest.approx(1 / mask.share)
            assert abs(mask.hidden_L.mean() - mask.share) < 0.1


def test_masks_are_the_places_with_the_least_noise_of_their_draw():
    group = MaskedGroup(9, 3, np.asarray([4, 7, 8, 11, 12]), "llada", 4)
    for draw in range(4):
        noise = uniforms(9, np.asarray([4, 7, 8, 11, 12]), SCORE_MASK, draw)
        share = (draw // 2 + uniforms(9, np.asarray([3]), SCORE_SHARE, draw)[0]) / 2
        count = 1 + int(share * 5)
        assert (
            group.mask(draw).hidden_L.tolist() == [one < sorted(noise)[count] for one in noise] if count < 5 else True
        )
        assert group.mask(draw).hidden_L.sum() == min(count, 5)


def test_keys_and_draws_have_masks_of_their_own():
    one, other = group_of(40), group_of(40, key=6)
    hidden = [mask.hidden_L.tolist() for group in (one, other) for mask in map(group.mask, range(8))]
    assert len({tuple(each) for each in hidden}) == 16
    assert [group_of(40).mask(draw).hidden_L.tolist() for draw in range(8)] == hidden[:8]


MINIMAL: dict[str, dict[str, Any]] = {"specdiff": {"drafter": {"path": "m"}}}


def settings_of(kind: str, **more: Any) -> DecoderChoice:
    adapter: TypeAdapter[Any] = TypeAdapter(DecoderSettings)
    found = adapter.validate_python({"kind": kind} | MINIMAL.get(kind, {}) | more)
    assert isinstance(found, DecoderChoice)
    return found


@pytest.mark.parametrize("family", get_args(ModelKind))
def test_each_kind_of_models_has_one_decoder_that_scores(family):
    (kind,) = (name for name, one in DECODERS.items() if one.runs_on == family and "score" in one.tasks)
    assert callable(resolve_name(DECODERS[kind].scorer))
    for name, one in DECODERS.items():
        if one.runs_on == family:
            assert scorer_of(settings_of(name)).name() == kind


def test_what_scores_keeps_the_settings_that_a_score_depends_on():
    drafting = settings_of("s2d2", block_size=4, causal_cache=True, fused=True, tau=0.5)
    assert scorer_of(drafting) == settings_of("block_diffusion", block_size=4, causal_cache=True)
    assert scorer_of(settings_of("stepwise", tokens_per_step=4)) == settings_of("stepwise")


def test_a_row_has_as_many_canvases_as_its_score_has_samples():
    task = Score.model_validate({"kind": "score", "estimate": {"samples": 16}}, strict=True)
    for kind, expected in (("stepwise", 80), ("any_subset", 5), ("autoregressive", 5)):
        assert most_canvases(task, settings_of(kind), 5) == expected  # type: ignore[arg-type]
    assert most_canvases(Score(kind="score"), settings_of("ancestral"), 2) == 256  # type: ignore[arg-type]
