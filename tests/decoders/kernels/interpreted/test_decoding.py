"""Whole decodes with the kernels in the interpreter: the texts, counters and log-probabilities of torch's operations."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.kernels import attention, layers, sampling
from draftmill.decoders.kernels.products import fixed_product
from draftmill.decoders.registry import build_decoder
from tests.decoders.backbones.causal_models import in_a_row, load, play, random_tokens, save_random, theirs
from tests.decoders.kernels.decoding import TORCH, Kernels, assert_equal, decoded, made_exact, setup_for

ALL = Kernels(attention.attend, sampling.sample)
FIXED = Kernels(partial(attention.attend, shares=1), product=fixed_product)


@pytest.mark.parametrize(
    ("name", "warp", "acceptance", "own"),
    [
        ("look-up", "plain", "coupled", True),
        ("assd", "all", "rejection", False),
        ("ssd, cached", "all", "coupled", True),
    ],
)
def test_drawn_texts_are_those_of_torch(name, warp, acceptance, own):
    settings = {"warp": warp, "acceptance": acceptance, "own": own, "count": 2, "length": 10, "new": 3}
    found, expected = (decoded(name, kernels, **settings) for kernels in (ALL, TORCH))
    assert_equal(found, expected, rounding=1e-4)


def test_a_prompt_that_joins_long_canvases_changes_no_text(poisoned):
    """Above 1,024 columns attention cuts them into shares: small tiles decode beside the large ones of the prompt."""
    prompts = [np.resize(np.arange(20, 40), count) for count in (3, 36)]
    requests = [Request(index, 7, np.append(prompt, np.full(1100, -1))) for index, prompt in enumerate(prompts)]
    found = []
    for kernels, steps in ((TORCH, 2), (ALL, 1)):  # without kernels the prompt runs alone
        setup, settings = setup_for("autoregressive", kernels, Sampling())
        decoder: Any = build_decoder(replace(setup, stops=Stops()), settings)
        for request, count in zip(requests, (1, steps), strict=True):
            decoder.admit([request])
            assert [decoder.step() for _ in range(count)] == [[]] * count
        found.append([decoder.samples[0].tokens[3:5], decoder.samples[1].tokens[36:37]])
    assert found[0] == found[1] and min(map(min, found[0])) >= 0


def test_hidden_states_are_those_of_transformers(tmp_path):
    model, texts = save_random(tmp_path, "mistral"), {0: random_tokens(3, seed=1), 2: random_tokens(15, seed=3)}
    backbone = load(tmp_path)
    backbone._attend = attention.attend
    backbone.forget()  # the cache of a kernel is another one
    backbone.allocate(3, 20)
    for slot, hidden in play(backbone, {slot: in_a_row(text) for slot, text in texts.items()}).items():
        torch.testing.assert_close(hidden, theirs(model, texts[slot])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "between"), [("qwen3", layers), ("qwen2-sliding", None), ("gpt2", None)])
def test_exact_models_have_the_same_bits_in_any_batch(tmp_path, family, between):
    save_random(tmp_path, family)
    backbone = made_exact(tmp_path, FIXED.attend, FIXED.product, between)
    backbone.allocate(5, 32)
    texts = {slot: random_tokens(length, seed=slot) for slot, length in enumerate((3, 9, 1, 20, 6))}

    def states(slots):
        """Of a forward of these slots: hidden states and logits of each."""
        backbone.forget()
        backbone.allocate(5, 32)
        found = play(backbone, {slot: in_a_row(texts[slot]) for slot in slots})
        return {slot: (hidden, backbone.logits(hidden)) for slot, hidden in found.items()}

    together = states(range(5))
    for slots in ((0,), (1,), (2,), (3,), (4,), (1, 3), (0, 2, 4)):
        for slot, (hidden, logits) in states(slots).items():
            assert torch.equal(hidden, together[slot][0]) and torch.equal(logits, together[slot][1])


@pytest.mark.parametrize("name", ["look-up", pytest.param("assd", marks=pytest.mark.soak)])
def test_exact_texts_have_the_same_bits_in_any_batch(name):
    few, many = (decoded(name, FIXED, count=count, warp="all", own=True, length=8, new=2) for count in (1, 2))
    assert few[0].tokens.tolist() == many[0].tokens.tolist() and few[0].logprob == many[0].logprob


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "w8a8"])
def test_layers_with_small_weights_run_between_the_kernels(tmp_path, kind):
    save_random(tmp_path, "qwen3", hidden_size=64, head_dim=16, intermediate_size=32, num_hidden_layers=1)
    backbone = load(tmp_path, small=kind)
    texts = {0: random_tokens(3, seed=1), 2: random_tokens(5, seed=3)}
    found = []
    for kernels in (False, True):
        if kernels:
            backbone._attend, backbone.base.kernels = attention.attend, layers
            backbone.forget()
        backbone.allocate(3, 20)
        found.append(play(backbone, {slot: in_a_row(text) for slot, text in texts.items()}))
    for slot in texts:
        torch.testing.assert_close(found[0][slot], found[1][slot], atol=5e-4, rtol=5e-4)  # rows are rounded to codes
