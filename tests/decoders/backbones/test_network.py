"""The rotary network beside transformers' modules: layer by layer, from the same states, in every dtype."""

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftmill.decoders.backbones.attention import Scores
from draftmill.decoders.backbones.network import Rotation
from tests.decoders.backbones.causal_models import (
    LLAMA3_ROPE,
    MODELS,
    ROTARY,
    decode_with_rejections,
    in_a_row,
    load,
    play,
    random_tokens,
    save_random,
)
from tests.decoders.references import kernels as reference

NAMES = sorted(name for name, (family, _) in MODELS.items() if not family.startswith("GPT"))
EVEN = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
TEXT = random_tokens(40, seed=4)
MOST = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 4e-2}
"""The largest difference, as a share of what a layer adds to a row: some roundings of each dtype."""


class Given(nn.Module):
    """Stands in for the embeddings: states that are there already."""

    def __init__(self, states_PD):
        super().__init__()
        self.states_PD = states_PD

    def forward(self, tokens_P):
        return nn.functional.pad(self.states_PD, (0, 0, 0, len(tokens_P) - len(self.states_PD)))


def layers_of_transformers(model, dtype):
    """The states before and after each layer of a text, by transformers' own modules."""
    noted = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, given, kwargs, output: noted.append((given[0][0], output[0])), with_kwargs=True
        )
    with torch.no_grad():
        model.to(getattr(torch, dtype))(torch.tensor([TEXT]), use_cache=False)
    return noted


def differences(backbone, noted):
    """How far each layer is from transformers' one, as shares of what it adds to a row; the largest share of a layer."""
    base, windows, parts, found = backbone.base, backbone.windows, backbone.base._parts, []
    base.taps = frozenset({1})
    for index, (before, after) in enumerate(noted):
        base._modules["word_embeddings"], base._parts = Given(before), [parts[index]]
        backbone.windows = windows[index : index + 1]
        backbone.forget()
        backbone.allocate(1, len(TEXT))
        play(backbone, {0: in_a_row(TEXT)})
        ours = base.tapped.pop(1)[: len(TEXT)].double()
        added = (after.double() - before.double()).norm(dim=1)
        found.append(float(((ours - after.double()).norm(dim=1) / added).max()))
    backbone.windows = windows
    return found


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("name", NAMES)
def test_each_layer_is_that_of_transformers(name, dtype, tmp_path):
    model = save_random(
        tmp_path, name, num_hidden_layers=2, max_position_embeddings=80, std=0.7 if name == "qwen3" else 0.4
    )
    backbone, noted = load(tmp_path, dtype), layers_of_transformers(model, dtype)
    assert len(noted) == 2 and max(differences(backbone, noted)) <= MOST[dtype]
    # A scale of attention that is wrong by a twentieth is found in every dtype.
    backbone.bind()
    backbone.base._scores = Scores(1.05 * backbone.base._scores.scaling)
    assert max(differences(backbone, noted)) > MOST[dtype]


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    LLAMA3_ROPE,
    LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    YARN,
    YARN | {"beta_fast": 4, "beta_slow": 2, "attention_factor": 1.3},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
]


@pytest.mark.parametrize("rope", ROPES)
def test_rotations_are_those_of_transformers(rope):
    config = transformers.LlamaConfig(**ROTARY | {"head_dim": 32, "max_position_embeddings": 128}, rope_parameters=rope)
    positions = torch.arange(120)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    ours = Rotation(rope, 32, 32, 128, torch.float32, torch.device("cpu")).at(positions)
    torch.testing.assert_close(ours[0], cos[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours[1].abs(), sin[0].abs(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, EVEN], ids=["odd widths", "even widths"])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_references_give_the_same_states(name, changes, tmp_path, monkeypatch):
    save_random(tmp_path, name, **changes)
    texts = {0: random_tokens(23, seed=1), 1: random_tokens(14, seed=2)}
    expected = decode_with_rejections(load(tmp_path), texts, prompts={0: 9, 1: 3})
    backbones = "draftmill.decoders.backbones"
    monkeypatch.setattr(f"{backbones}.transformer.find_attention", lambda *_, **__: reference.attend)
    monkeypatch.setattr(f"{backbones}.network.find_layers", lambda *_, **__: reference.LAYERS)
    backbone = load(tmp_path)
    assert backbone.base.kernels is reference.LAYERS
    found = decode_with_rejections(backbone, texts, prompts={0: 9, 1: 3})
    for slot in texts:
        torch.testing.assert_close(found[slot], expected[slot], atol=2e-5, rtol=1e-4)


def test_products_of_the_same_rows_are_one(tmp_path):
    save_random(tmp_path, "qwen2", **EVEN)
    names = {name.rpartition(".")[0] for name, _ in load(tmp_path).base.layers[0].named_parameters()}
    assert not {name for name in names if name.split(".")[-1] in {"q_proj", "k_proj", "gate_proj"}}
