"""Models with what kernels need in the place of the rectangle and the loop over experts: the same outcomes."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.blocks import llada2_shape
from draftmill.decoders.backbones.families.rotary import MixtureShape
from draftmill.decoders.backbones.moe import Mixture
from draftmill.decoders.backbones.network import RotaryBackbone
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
from tests.device.pretend import pretending


def softmax_mixture():
    return Mixture(12, MixtureShape(inner=20, num_experts=7, num_chosen=3, normalise=True))


def sigmoid_mixture():
    return Mixture(12, MixtureShape(inner=20, num_experts=8, num_chosen=2, groups=(4, 2), scale=2.5, shared=6))


def filled(mixture):
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return mixture.requires_grad_(False)


@pytest.mark.parametrize("make", [softmax_mixture, sigmoid_mixture])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_gathered_experts_answer_as_the_loop_does(make, rows):
    mixture, hidden = filled(make()), torch.randn(2, rows, 12, generator=torch.Generator().manual_seed(1))
    expected = mixture(hidden)
    mixture.gather(reference.product)
    torch.testing.assert_close(mixture(hidden), expected)


def test_gathered_weights_are_still_the_experts_own():
    mixture = filled(softmax_mixture())
    before = [expert.up_proj.weight.clone() for expert in mixture.experts]
    mixture.gather(reference.product)
    after = [expert.up_proj.weight for expert in mixture.experts]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len({weight.untyped_storage().data_ptr() for weight in after}) == 1, "the weights are in memory once"


class Peak(TorchDispatchMode):
    """Follows the bytes of the tensors that operations read or make while it is there."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def _meet(self, tensor):
        # Each call returns a new wrapper of a storage, so the tensors that have it are counted.
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        holders = self.alive.setdefault(place, [0, size])
        holders[0] += 1
        weakref.finalize(tensor, self._part, place)

    def _part(self, place):
        self.alive[place][0] -= 1
        if not self.alive[place][0]:
            del self.alive[place]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._meet(tensor)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return found


def test_a_model_is_loaded_without_holding_its_experts_twice(monkeypatch):
    """Twice would be 110 GB for SDAR-30B, whose experts an 80 GB device can hold once."""
    config = json.loads((Path(__file__).parents[2] / "data/llada2/config.json").read_text())
    config |= {"num_hidden_layers": 6, "moe_intermediate_size": 256}
    weights = {name: torch.zeros(size) for name, size in llada2_shape(config).tensors().items()}
    total = sum(weight.nbytes for weight in weights.values())
    experts = sum(weight.nbytes for name, weight in weights.items() if ".experts." in name)
    assert experts > 0.8 * total
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_product", lambda *_, **__: reference.product)
    monkeypatch.setattr("draftmill.decoders.backbones.packed.can_pack", lambda *_: False)
    with Peak() as peak:
        backbone = RotaryBackbone(llada2_shape(config), weights, Running(torch.float32, torch.device("cpu")))
    assert all(part.is_gathered for part in backbone.base.modules() if isinstance(part, Mixture))
    assert weights == {} and total * 0.8 <= peak.most <= total * 1.2


@pytest.mark.parametrize("make", [softmax_mixture, sigmoid_mixture])
def test_gathered_experts_do_not_wait_for_the_device(make):
    def waits(*, gathered: bool) -> tuple[int, int]:
        mixture = filled(make())
        with pretending() as counts, torch.no_grad():
            mixture.to("cuda")
            if gathered:
                mixture.gather(reference.product)
            hidden = torch.zeros(9, 12, device="cuda")
            counts.clear()
            mixture(hidden)
            return counts.waits, counts.shapes

    assert waits(gathered=True) == (0, 0)
    assert waits(gathered=False)[0] > 0, "the loop reads back how many rows each expert has"


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
