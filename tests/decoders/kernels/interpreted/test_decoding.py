"""Whole decodes with the kernels in the interpreter: the texts, counters and log-probabilities of torch's operations."""

import pytest
import torch

from draftmill.decoders.kernels import attention, sampling
from tests.decoders.backbones.causal_models import in_a_row, load, play, random_tokens, save_random, theirs
from tests.decoders.kernels.decoding import TORCH, Kernels, assert_equal, decoded

ALL = Kernels(attention.attend, sampling.sample)


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


def test_hidden_states_are_those_of_transformers(tmp_path):
    model, texts = save_random(tmp_path, "mistral"), {0: random_tokens(3, seed=1), 2: random_tokens(15, seed=3)}
    backbone = load(tmp_path)
    backbone._attend = attention.attend
    backbone.allocate(3, 20)
    for slot, hidden in play(backbone, {slot: in_a_row(text) for slot, text in texts.items()}).items():
        torch.testing.assert_close(hidden, theirs(model, texts[slot])[0], atol=1e-5, rtol=1e-5)
