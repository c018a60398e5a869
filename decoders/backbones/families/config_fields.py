"""Reads config.json: single fields, and those of the causal families as transformers' config classes do.

transformers is not imported, which would take seconds. FIELDS are the fields of those classes, with their types and defaults.
Derived fields are computed as in the classes, and values that the classes or modules reject are rejected here. All of it is
compared with transformers in tests/decoders/backbones/test_causal_config.py. Unknown fields are kept, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

Config = Mapping[str, Any]
Fields = dict[str, tuple[str, Any]]

_BASE: Final[Fields] = {
    "transformers_version": ("str | None", None),
    "architectures": ("list[str] | None", None),
    "output_hidden_states": ("bool | None", False),
    "return_dict": ("bool | None", True),
    "dtype": ("str | None", None),
    "chunk_size_feed_forward": ("int", 0),
    "is_encoder_decoder": ("bool", False),
    "id2label": ("dict | None", None),
    "label2id": ("dict | None", None),
    "problem_type": ("str | None", None),
}
_NUMBER: Final = "float | int"
_ROTARY: Final[Fields] = _BASE | {
    "vocab_size": ("int", 151936),
    "hidden_size": ("int", 4096),
    "intermediate_size": ("int", 22016),
    "num_hidden_layers": ("int", 32),
    "num_attention_heads": ("int", 32),
    "num_key_value_heads": ("int | None", 32),
    "hidden_act": ("str", "silu"),
    "max_position_embeddings": ("int", 32768),
    "initializer_range": ("float", 0.02),
    "rms_norm_eps": ("float", 1e-6),
    "use_cache": ("bool", True),
    "tie_word_embeddings": ("bool", False),
    "rope_parameters": ("dict | None", None),
    "attention_dropout": (_NUMBER, 0.0),
    "pad_token_id": ("int | None", None),
    "bos_token_id": ("int | None", None),
    "eos_token_id": ("int | list[int] | None", None),
}
_QWEN: Final[Fields] = _ROTARY | {"use_sliding_window": ("bool", False), "sliding_window": ("int | None", 4096)}
_QWEN_LAYERS: Final[Fields] = {"max_window_layers": ("int", 28), "layer_types": ("list[str] | None", None)}
_LLAMA: Final[Fields] = _ROTARY | {
    "vocab_size": ("int", 32000),
    "max_position_embeddings": ("int", 2048),
    "bos_token_id": ("int | None", 1),
    "eos_token_id": ("int | list[int] | None", 2),
    "head_dim": ("int | None", None),
}
FIELDS: Final[dict[str, Fields]] = {
    "LlamaConfig": _LLAMA
    | {
        "intermediate_size": ("int", 11008),
        "num_key_value_heads": ("int | None", None),
        "pretraining_tp": ("int | None", 1),
        "attention_bias": ("bool", False),
        "attention_dropout": ("int | float | None", 0.0),
        "mlp_bias": ("bool", False),
    },
    "MistralConfig": _LLAMA
    | {
        "intermediate_size": ("int", 14336),
        "num_key_value_heads": ("int", 8),
        "max_position_embeddings": ("int", 131072),
        "sliding_window": ("int | None", 4096),
    },
    "Qwen2Config": _QWEN | _QWEN_LAYERS,
    "Qwen3Config": _QWEN | _QWEN_LAYERS | {"head_dim": ("int", 128), "attention_bias": ("bool", False)},
    "Qwen3MoeConfig": _QWEN
    | {
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 6144),
        "num_hidden_layers": ("int", 24),
        "num_key_value_heads": ("int", 4),
        "attention_bias": ("bool", False),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 768),
        "num_experts_per_tok": ("int", 8),
        "num_experts": ("int", 128),
        "norm_topk_prob": ("bool", False),
        "output_router_logits": ("bool", False),
        "router_aux_loss_coef": ("float", 0.001),
        "mlp_only_layers": ("list[int] | None", None),
    },
}
"""Type and default of every field, by the config class of transformers that has it."""

ALIASES: Final[dict[str, dict[str, str]]] = {
    "Qwen3MoeConfig": {"num_local_experts": "num_experts"},
}
"""Second names of fields."""

ACTIVATIONS: Final = {
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh",
    "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu",
    "sqrtsoftplus", "swish", "tanh",
}  # fmt: skip
"""Those of transformers that have no weights of their own."""

_COUNTS: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_inner",
)  # fmt: skip
_SHARES: Final = (
    "initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout",
    "resid_dropout", "embed_dropout", "classifier_dropout",
)  # fmt: skip
_DTYPES: Final = {
    "bfloat16", "double", "float", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "half", "int8", "uint8",
}  # fmt: skip
_ROPE_NEEDS: Final = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_SUB_CONFIGS: Final = ("decoder", "generator", "text_config", "text_encoder")


def read_fields(config_class: str, config: Config) -> SimpleNamespace:
    """Return the fields of a config class, and what transformers derives from them, as attributes. Raises ValueError, TypeError
    or ArithmeticError if config.json is invalid for that class, or no module can be built from it."""
    fields, aliases = FIELDS[config_class], ALIASES.get(config_class, {})
    given = {aliases.get(key, key): value for key, value in config.items()}
    values = {key: default for key, (_, default) in fields.items()} | given
    for key, (kinds, _) in fields.items():
        if not any(_is(values[key], kind) for kind in kinds.split(" | ")):
            raise ValueError(f"{key} = {values[key]!r}; allowed: {kinds.replace(' | ', ', ').replace('None', 'null')}")
    values |= {alias: values[key] for alias, key in aliases.items()}
    parsed = SimpleNamespace(**values)
    _check_base(parsed)
    _DERIVE[config_class](parsed)
    _check_layers(parsed)
    return parsed


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "None":
            return value is None
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float" | "str" | "bool" | "dict":
            return type(value).__name__ == kind
        case "list" | "tuple":
            return isinstance(value, list)
        case "list[int]" | "list[str]":
            return isinstance(value, list) and all(_is(item, kind[5:-1]) for item in value)
    raise AssertionError(kind)


def _check_base(parsed: Any) -> None:
    for key in ("dtype", "torch_dtype"):
        dtype = getattr(parsed, key, None)
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"{key} = {dtype!r}; allowed: {', '.join(sorted(_DTYPES))}")
    inner = [key for key in _SUB_CONFIGS if getattr(parsed, key, None) is not None]
    if inner:
        raise ValueError(f"it has {inner[0]}, the config of a model inside of it; such models are not read")
    scaling = getattr(parsed, "rope_scaling", None)
    if scaling is not None and not isinstance(scaling, dict):
        raise ValueError(f"rope_scaling = {scaling!r}; allowed: an object, null")
    for key in _SHARES:
        if not 0.0 <= (getattr(parsed, key, None) or 0.0) <= 1.0:
            raise ValueError(f"{key} = {getattr(parsed, key)}; allowed: 0 to 1")
    for key in _COUNTS:
        value = getattr(parsed, key, None)
        if value is not None and not (_is_number(value) and value >= 1):
            raise ValueError(f"{key} = {value!r}; allowed: numbers >= 1")
    activation = getattr(parsed, "hidden_act", None) or getattr(parsed, "activation_function", None)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}; allowed: {', '.join(sorted(ACTIVATIONS))}")


def _check_layers(parsed: Any) -> None:
    types = getattr(parsed, "layer_types", None)
    if types is not None and not (_is(types, "list[str]") and len(types) == parsed.num_hidden_layers):
        raise ValueError(f"layer_types has no entry for each of the {parsed.num_hidden_layers} layers")
    if types is not None:
        parsed.layer_types = ["full_attention" if kind == "attention" else kind for kind in types]


def _llama(parsed: Any) -> None:
    _mistral(parsed)
    if parsed.hidden_size % parsed.num_attention_heads:
        raise ValueError(f"hidden_size {parsed.hidden_size} is not a multiple of {parsed.num_attention_heads} heads")


def _mistral(parsed: Any) -> None:
    if parsed.head_dim is None:
        parsed.head_dim = parsed.hidden_size // parsed.num_attention_heads
    if parsed.head_dim < 1:
        raise ValueError(f"hidden_size {parsed.hidden_size} is too small for {parsed.num_attention_heads} heads")
    _rotary(parsed)


def _qwen(parsed: Any) -> None:
    parsed.sliding_window = parsed.sliding_window if parsed.use_sliding_window else None
    _rotary(parsed)


def _qwen_layers(parsed: Any) -> None:
    _qwen(parsed)
    if parsed.layer_types is None:
        has_window, first = parsed.sliding_window is not None, parsed.max_window_layers
        parsed.layer_types = [
            "sliding_attention" if has_window and layer >= first else "full_attention"
            for layer in range(parsed.num_hidden_layers)
        ]


def _qwen_moe(parsed: Any) -> None:
    _qwen(parsed)
    parsed.mlp_only_layers = parsed.mlp_only_layers or []
    if not 1 <= parsed.num_experts_per_tok <= parsed.num_experts:
        raise ValueError(
            f"num_experts_per_tok = {parsed.num_experts_per_tok} of {parsed.num_experts} experts; allowed: 1 to all"
        )
    if min(parsed.decoder_sparse_step, parsed.moe_intermediate_size) < 1:
        raise ValueError("decoder_sparse_step or moe_intermediate_size is below 1")


def _rotary(parsed: Any) -> None:
    if parsed.num_key_value_heads is None:
        parsed.num_key_value_heads = parsed.num_attention_heads
    pad = parsed.pad_token_id
    if pad is not None and not -parsed.vocab_size <= pad < parsed.vocab_size:
        raise ValueError(f"pad_token_id = {pad}: Padding_idx must be within the {parsed.vocab_size} ids")
    parsed.rope_parameters = _rope(parsed)


def _rope(parsed: Any) -> dict[str, Any]:
    """The rotary settings as one dict, for config.json of any version of transformers."""
    held = getattr(parsed, "rope_scaling", None) or parsed.rope_parameters or {}
    if not isinstance(held, dict) or any(isinstance(value, dict) for value in held.values()):
        raise ValueError("rope_parameters must be an object of plain values; per-layer rotations are not supported")
    rope = dict(held)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", getattr(parsed, "rope_theta", 10_000.0))
    turned = getattr(parsed, "partial_rotary_factor", None)
    if turned is not None:
        rope.setdefault("partial_rotary_factor", turned)
    lacking = [key for key in _ROPE_NEEDS.get(str(rope["rope_type"]), ()) if not _is_number(rope.get(key))]
    lacking += [] if _is_number(rope["rope_theta"]) else ["rope_theta"]
    if lacking:
        raise ValueError(f"rope_parameters has no number for {', '.join(lacking)}")
    width = getattr(parsed, "head_dim", None)
    if width is not None and width > 4 and width % 2 and rope.get("partial_rotary_factor") in {None, 1.0}:
        raise ValueError(f"head_dim = {width}; allowed: even numbers, since rotary embeddings pair dimensions")
    return rope


def _is_number(value: Any) -> bool:
    return _is(value, "int") or _is(value, "float")


_DERIVE: Final[dict[str, Callable[[Any], None]]] = {
    "LlamaConfig": _llama,
    "MistralConfig": _mistral,
    "Qwen2Config": _qwen_layers,
    "Qwen3Config": _qwen_layers,
    "Qwen3MoeConfig": _qwen_moe,
}


# ---- single fields ----------------------------------------------------------------------------------------------------


@contextmanager
def fitting(family: str, *errors: type[Exception]) -> Iterator[None]:
    """Within the `with` block, a ValueError, or one of these errors, becomes a ValueError that names config.json and the
    family."""
    caught: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except caught as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model.path: config.json does not fit family {family!r}: {reason}") from error


def numbers(config: Config, names: Mapping[str, str], family: str) -> dict[str, int]:
    """Read whole numbers >= 1; `names` maps ours to config.json's. ValueError names the first missing or invalid one."""
    sizes = {}
    for ours, theirs in names.items():
        value = config.get(theirs)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"model.path: config.json of family {family!r} has {theirs} = {value!r}; allowed: whole numbers >= 1"
            )
        sizes[ours] = value
    return sizes


def demand(config: Config, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if config.json has an unsupported value; a missing key stands for the first allowed value."""
    for key, allowed in supported.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"it has {key} = {value!r}; supported: {', '.join(map(repr, allowed))}")


def token_id(config: Config, key: str, default: int) -> int:
    """Read the id of a token; the default if it is missing or null; ValueError if it is not a number."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
    return value
