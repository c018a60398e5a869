"""Models whose attention a kernel computes: with its torch reference in its place, outcomes are those of the rectangle."""

import pytest
import torch

from draftmill.decoders.backbones.moe import Mixture
from tests.decoders.backbones.causal_models import (
    decode_with_rejections,
    load,
    play,
    random_tokens,
    save_random,
    theirs,
)
from tests.decoders.backbones.masked_models import load as load_masked
from tests.decoders.kernels.decoding import CASES, TORCH, Kernels, assert_equal, decoded, scored
from tests.decoders.references import kernels as reference

FLAT = Kernels(attend=reference.attend)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_outcomes_are_those_of_the_rectangle(name):
    found, expected = (decoded(name, kernels, warp="plain") for kernels in (FLAT, TORCH))
    assert_equal(found, expected, rounding=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_scores_are_those_of_the_rectangle(name):
    found, expected = (scored(name, kernels) for kernels in (FLAT, TORCH))
    assert_equal(found, expected, rounding=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-sliding", "gpt_neo", "gpt2-scales"])
def test_hidden_states_are_those_of_transformers_whatever_the_windows(tmp_path, monkeypatch, name):
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_attention", lambda *_, **__: reference.attend)
    model, texts = save_random(tmp_path, name), {0: random_tokens(14, seed=1), 2: random_tokens(21, seed=3)}
    ours = decode_with_rejections(load(tmp_path), texts, prompts={0: 6, 2: 11})
    for slot, text in texts.items():
        torch.testing.assert_close(ours[slot], theirs(model, text)[0], atol=1e-5, rtol=1e-5)


def test_long_forwards_score_some_heads_at_once(monkeypatch):
    expected = decoded("any_subset", FLAT, warp="plain", count=2)
    monkeypatch.setattr("draftmill.decoders.backbones.xlnet._MAX_RELATIVE_NUMBERS", 1)
    assert_equal(decoded("any_subset", FLAT, warp="plain", count=2), expected, rounding=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llada2", "mdlm", "sdar"])
def test_models_of_masks_and_mixtures_take_the_kernels_of_their_device(golden, monkeypatch, family):
    texts = {0: random_tokens(19, seed=1, vocab_size=40), 2: random_tokens(7, seed=2, vocab_size=40)}
    both_ways = {
        slot: [(token, at, at, range(len(text))) for at, token in enumerate(text)] for slot, text in texts.items()
    }

    def hidden():
        backbone = load_masked(golden / family)
        backbone.allocate(3, 32)
        return backbone, play(backbone, both_ways)

    # On a GPU no weights are packed.
    monkeypatch.setattr("draftmill.decoders.backbones.packed.can_pack", lambda *_: False)
    _, expected = hidden()
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_attention", lambda *_, **__: reference.attend)
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_product", lambda *_, **__: reference.product)
    backbone, found = hidden()
    mixtures = [part for part in backbone.model.modules() if isinstance(part, Mixture)]
    assert bool(mixtures) == (family == "llada2") and all(part.is_gathered for part in mixtures)
    for slot in texts:
        torch.testing.assert_close(found[slot], expected[slot], atol=1e-4, rtol=1e-4)
