"""The rotary network beside transformers' modules, layer by layer, and what config.json, read without them, says of it."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftmill.decoders.backbones.attention import Scores
from draftmill.decoders.backbones.families.table import FAMILIES
from draftmill.decoders.backbones.network import Rotation
from tests.decoders.backbones.causal_models import (
    LLAMA3_ROPE,
    MODELS,
    ROTARY,
    SLIDING,
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


def test_where_a_part_of_a_head_is_rotated_the_rest_has_no_angle():
    part, whole = (Rotation(ROPES[0], width, 4, 128, torch.float64, torch.device("cpu")) for width in (12, 4))
    (cos, sin), (cos_4, sin_4), rest = part.at(torch.arange(9)), whole.at(torch.arange(9)), [2, 3, 4, 5]
    assert part.order_d is not None and whole.order_d is None
    assert part.order_d.tolist() == [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]
    assert torch.equal(cos[:, [0, 1, 6, 7]], cos_4) and torch.equal(sin[:, [0, 1, 6, 7]], sin_4)
    assert (cos[:, rest] == 1).all() and (sin[:, rest] == 0).all()


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


CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "dream": "Qwen2",
    "sdar": "Qwen3",
    "sdar_moe": "Qwen3Moe",
    "fast_dllm_v2": "Qwen2",
}
ONE_LAYER: dict = ROTARY | {"num_hidden_layers": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SMALL = dict.fromkeys(CLASSES, ONE_LAYER) | {"sdar_moe": ONE_LAYER | MOE}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}
VARIATIONS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": None, "rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 300}),
    ("mistral", {"head_dim": 20, "sliding_window": None, "num_key_value_heads": 4}),
    ("qwen2", SLIDING | {"max_window_layers": 0, "tie_word_embeddings": True}),
    ("qwen2", {"layer_types": ["attention"], "head_dim": 16}),
    ("qwen3", {"attention_bias": True, "head_dim": 24, "num_key_value_heads": 1}),
    ("sdar_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("sdar_moe", {"num_local_experts": 3, "attention_bias": True}),
    ("dream", {"torch_dtype": "bfloat16", "rope_theta": 1e6, "max_window_layers": 28}),
]
# Fields that decide something, and what is tried for each.
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
VALUES = [None, 0, -1, 3, 2.5, True, "x", "5", [], [1], {}, {"a": 1}, LINEAR, "gelu", ["full_attention"]]


def module_of(name, config):
    """transformers' config object, and the tensors of its module; an exception where it can't be built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = getattr(transformers, f"{CLASSES[name]}Config").from_dict(dict(config))
        with torch.device("meta"):
            model = getattr(transformers, f"{CLASSES[name]}ForCausalLM")(parsed)
    tied = {"lm_head.weight"} if parsed.tie_word_embeddings else set()
    held = revert_weight_conversion(model, model.state_dict())  # experts one by one, as checkpoints have them
    return parsed, {key: tuple(tensor.shape) for key, tensor in held.items() if key not in tied}


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in CLASSES), *VARIATIONS])
def test_sizes_and_tensors_are_those_of_transformers(name, changes):
    config = SMALL[name] | changes
    parsed, expected = module_of(name, config)
    ours = FAMILIES[name].shape(config)
    assert FAMILIES[name].weight_shapes(config) == expected
    for key in ("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act"):
        assert getattr(ours, key) == getattr(parsed, key)
    assert {key: ours.rope[key] for key in ("rope_type", "rope_theta")} == {
        key: parsed.rope_parameters[key] for key in ("rope_type", "rope_theta")
    }
    kinds = getattr(parsed, "layer_types", None) or [f"{'sliding' if name == 'mistral' else 'full'}_attention"] * 4
    windows = [parsed.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.windows) == windows[: ours.num_hidden_layers]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "sdar_moe"])
def test_a_config_without_optional_fields_is_that_of_transformers(name):
    config = {key: value for key, value in SMALL[name].items() if key not in {"max_position_embeddings"}}
    config |= {"num_key_value_heads": 4, "head_dim": 8}
    parsed, ours = module_of(name, config)[0], FAMILIES[name].shape(config)
    assert (ours.max_position_embeddings, ours.rms_norm_eps) == (parsed.max_position_embeddings, parsed.rms_norm_eps)
    assert ours.tied == parsed.tie_word_embeddings and ours.rope["rope_theta"] == parsed.rope_parameters["rope_theta"]


def attempted(call):
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - transformers and torch raise what they like
        return None, error


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "sdar_moe"])
@pytest.mark.slow
def test_strange_values_are_refused_or_read_as_transformers_does(name):
    accepted, wrong = 0, []
    for key in FIELDS:
        for value in VALUES:
            config = SMALL[name] | {key: value}
            ours, error = attempted(lambda config=config: FAMILIES[name].weight_shapes(config))
            assert error is None or isinstance(error, ValueError), (key, value, error)
            if error is None:
                theirs, _ = attempted(lambda config=config: module_of(name, config))
                accepted += 1
                if theirs is not None and ours != theirs[1]:
                    wrong.append(f"{key} = {value!r}")
    assert not wrong and accepted > 30, (accepted, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "work"),
    [
        *((name, "load import load_backbone as work") for name in ("ar-micro", "mdm-tiny", "block-tiny")),
        ("asarm-tiny", "checkpoint import inspect_model as work"),  # its network is transformers'
    ],
)
def test_a_network_loads_without_transformers_or_compilers(name, work):
    code = (
        f"import sys; from pathlib import Path; from draftmill.decoders.backbones.{work};"
        "work(Path(sys.argv[1]));"
        "sys.exit(', '.join({'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules)) or 0)"
    )
    builtin = Path(__file__).resolve().parents[3] / "decoders" / "builtin" / name
    result = subprocess.run([sys.executable, "-c", code, str(builtin)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
