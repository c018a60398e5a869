"""config.json is read without transformers, and is what transformers reads: fields, defaults, shapes, and what is refused."""

import dataclasses
import subprocess
import sys
import types
import typing
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from transformers.activations import ACT2FN
from transformers.core_model_loading import revert_weight_conversion

from draftmill.decoders.backbones.families import causal as causal_families
from draftmill.decoders.backbones.families import config_fields
from draftmill.decoders.backbones.families.blocks import QWEN_FAMILIES
from draftmill.decoders.backbones.families.causal import CAUSAL_FAMILIES, read_config
from draftmill.decoders.backbones.families.masked import DREAM
from tests.decoders.backbones.causal_models import LLAMA3_ROPE, ROTARY, SLIDING

FAMILIES = {family.name: family for family in (*CAUSAL_FAMILIES, DREAM, *(one for one, _ in QWEN_FAMILIES))}
ONE_LAYER = ROTARY | {"num_hidden_layers": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SMALL = dict.fromkeys(FAMILIES, ONE_LAYER) | {
    "sdar_moe": ONE_LAYER | MOE,
}
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
VALUES = [None, 0, -1, 3, 2.5, True, "x", "5", [], [1], {}, {"a": 1}]


def spelled(annotation):
    """An annotation as FIELDS writes it."""
    if isinstance(annotation, str):
        return annotation
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return " | ".join(spelled(part) for part in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    return str(annotation) if typing.get_args(annotation) else annotation.__name__


def simple(annotation):
    """Without what JSON can't tell apart, and in one order."""
    text = spelled(annotation)
    for theirs, ours in (
        ("torch.dtype | ", ""),
        ("RopeParameters | ", ""),
        ("dict[int, str] | dict[str, str]", "dict"),
        ("dict[str, int] | dict[str, str]", "dict"),
        ("Literal['regression', 'single_label_classification', 'multi_label_classification']", "str"),
    ):
        text = text.replace(theirs, ours)
    return set(text.split(" | "))


@pytest.mark.parametrize("name", config_fields.FIELDS)
def test_the_fields_are_those_of_transformers(name):
    theirs = {field.name: field for field in dataclasses.fields(getattr(transformers, name))}
    ours = config_fields.FIELDS[name]
    assert ours.keys() == theirs.keys()
    for key, (kinds, default) in ours.items():
        assert set(kinds.split(" | ")) == simple(theirs[key].type), key
        assert default == theirs[key].default and type(default) is type(theirs[key].default), key


def test_second_names_and_activations_are_those_of_transformers():
    for name in config_fields.FIELDS:
        names = dict(getattr(transformers, name).attribute_map)
        if name == "Qwen3MoeConfig":  # a field that is kept under its second name
            names = {second: field for field, second in names.items()}
        assert config_fields.ALIASES.get(name, {}) == names
    with_weights = {name for name in ACT2FN if list(ACT2FN[name].parameters())}
    assert set(ACT2FN) - with_weights == config_fields.ACTIVATIONS


def module_shapes(family, config):
    """What transformers' own module holds; ValueError where it can't be built."""
    fields = causal_families._fields(family, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = getattr(transformers, family.config_class).from_dict(fields)
        with torch.device("meta"):
            model = getattr(transformers, family.model_class)(parsed)
    tied = {"lm_head.weight"} if parsed.tie_word_embeddings else set()
    held = revert_weight_conversion(model, model.state_dict())  # experts one by one, as checkpoints have them
    return parsed, {name: tuple(t.shape) for name, t in held.items() if name not in tied}


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in FAMILIES), *VARIATIONS])
def test_shapes_are_those_of_the_module(name, changes):
    family, config = FAMILIES[name], SMALL[name] | changes
    parsed, expected = module_shapes(family, config)
    assert causal_families.weight_shapes(family, config) == expected
    ours = read_config(family, config)
    assert family.windows(ours) == family.windows(parsed)
    assert causal_families.vocab_size(family, config) == parsed.vocab_size
    assert causal_families.max_positions(family, config) == parsed.max_position_embeddings
    for read in (causal_families.key_value_heads, causal_families.head_width):
        assert read(ours) == read(parsed)
    if hasattr(parsed, "rope_parameters"):
        assert {key: ours.rope_parameters.get(key) for key in ("rope_type", "rope_theta")} == {
            key: parsed.rope_parameters.get(key) for key in ("rope_type", "rope_theta")
        }


def refused(call):
    try:
        return None, call()
    except Exception as error:  # noqa: BLE001 - transformers and torch raise what they like
        return error, None


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "sdar_moe"])
@pytest.mark.slow
def test_what_transformers_refuses_is_refused_and_the_rest_has_the_same_shapes(name):
    family = FAMILIES[name]
    accepted, wrong = 0, []
    for key in (*config_fields.FIELDS[family.config_class], "rope_scaling", "rope_theta", "torch_dtype", "text_config"):
        for value in VALUES:
            config = SMALL[name] | {key: value}
            error, ours = refused(lambda config=config: causal_families.weight_shapes(family, config))
            assert error is None or isinstance(error, ValueError), (key, value, error)
            if error is None:
                theirs, found = refused(lambda config=config: module_shapes(family, config))
                accepted += 1
                if theirs is not None or ours != found[1]:
                    wrong.append(f"{key} = {value!r} is accepted, but transformers says: {theirs!r}")
    assert not wrong and accepted > 30, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ar-micro", "mdm-tiny", "block-tiny"])
def test_a_network_loads_without_transformers_or_compilers(name):
    code = (
        "import sys; from pathlib import Path; from draftmill.decoders.backbones.load import load_backbone;"
        "load_backbone(Path(sys.argv[1]), device='cpu');"
        "sys.exit(', '.join({'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules)) or 0)"
    )
    builtin = Path(__file__).resolve().parents[3] / "decoders" / "builtin" / name
    result = subprocess.run([sys.executable, "-c", code, str(builtin)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
