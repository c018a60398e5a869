"""The causal model families of network.py: how config.json names their sizes, and the tensors of their checkpoints.

A checkpoint is described from its JSON alone (config_fields.py, and `shapes_of` below); its remote code is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from draftmill.decoders.backbones.families.config_fields import fitting, read_fields
from draftmill.decoders.backbones.families.rotary import MixtureShape, RotaryShape

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
# Frequencies that follow the longest sequence of a batch would make a sample depend on its neighbours.
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
# Fields about how to run the weights, without effect on what they compute.
_HOW_TO_RUN: Final = {
    "attn_implementation", "_attn_implementation", "return_dict", "architectures", "transformers_version",
    "id2label", "label2id", "num_labels", "problem_type", "quantization_config", "compression_config",
}  # fmt: skip


def _no_windows(config: Any) -> tuple[int | None, ...]:
    return (None,) * config.num_hidden_layers


def _window(size: int | None, field: str) -> int | None:
    if size is not None and size < 1:
        raise ValueError(f"{field} = {size}; allowed: numbers of positions >= 1")
    return size


def _one_window(config: Any) -> tuple[int | None, ...]:
    return (_window(config.sliding_window, "sliding_window"),) * config.num_hidden_layers


def _windows_by_type(config: Any) -> tuple[int | None, ...]:
    unknown = sorted(set(config.layer_types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; supported: full_attention, sliding_attention")
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ValueError(
            "layer_types holds sliding_attention, but sliding_window is null or use_sliding_window is false"
        )
    window = _window(config.sliding_window, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


@dataclass(frozen=True, slots=True)
class CausalFamily:
    """One architecture. `prefix` is what public checkpoints put before the names of the base model, or leave out.

    `buffers` are tensors that checkpoints may hold and no module reads, `{}` standing for the layer. `windows` says how many
    positions back each layer sees, its own included, None for all. `convert` gives weights the names of transformers' Llama.
    `translate` maps config.json to the fields of `config_class`, if the family names them differently.
    """

    name: str
    config_class: str
    model_class: str
    prefix: str
    buffers: tuple[str, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    windows: Callable[[Any], tuple[int | None, ...]] = _no_windows
    translate: Callable[[Config], Config] = lambda config: config


def rotary_family(name: str, classes: str, **more: Any) -> CausalFamily:
    """A family on transformers' `classes` with rotary positions; `more` are other fields of CausalFamily."""
    buffers = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")
    return CausalFamily(name, f"{classes}Config", f"{classes}ForCausalLM", "model.", buffers, **more)


CAUSAL_FAMILIES: Final = (
    rotary_family("llama", "Llama"),
    rotary_family("mistral", "Mistral", windows=_one_window),
    rotary_family("qwen2", "Qwen2", windows=_windows_by_type),
    rotary_family("qwen3", "Qwen3", windows=_windows_by_type),
)


# ---- what config.json says ---------------------------------------------------------------------------------------


# What reading an invalid config may raise besides ValueError.
_UNREADABLE: Final = (TypeError, KeyError, AttributeError, ArithmeticError)


def read_config(family: CausalFamily, config: Config) -> Any:
    """Return the fields of config.json as `parse_config` would; ValueError if it is unusable, or unsuited to batching."""
    with fitting(family.name, *_UNREADABLE):
        parsed = read_fields(family.config_class, _fields(family, config))
        _check(family, config, parsed)
    return parsed


def _fields(family: CausalFamily, config: Config) -> dict[str, Any]:
    return {key: value for key, value in family.translate(config).items() if key not in _HOW_TO_RUN}


def _check(family: CausalFamily, config: Config, parsed: Any) -> None:
    heads, key_heads = parsed.num_attention_heads, key_value_heads(parsed)
    if min(heads, key_heads, parsed.num_hidden_layers, parsed.hidden_size, parsed.vocab_size) < 1:
        raise ValueError("it has a layer, head, width or vocabulary count below 1")
    if heads % key_heads or (getattr(parsed, "head_dim", None) is None and parsed.hidden_size % heads):
        raise ValueError(f"width {parsed.hidden_size}, {heads} heads and {key_heads} key heads do not divide evenly")
    _check_rope(getattr(parsed, "rope_parameters", None) or {})
    family.windows(parsed)


def _check_rope(rope_parameters: Config) -> None:
    rope, turned = rope_parameters.get("rope_type", "default"), rope_parameters.get("partial_rotary_factor")
    if rope not in _ROPE_TYPES:
        raise ValueError(
            f"rope type {rope!r}; supported: {', '.join(_ROPE_TYPES)} (one whose frequencies follow the longest sequence "
            "of a batch would make samples depend on each other)"
        )
    # The default type rotates whole heads and ignores this field; the other types would give too few angles.
    if rope != "default" and turned not in {None, 1.0}:
        raise ValueError(
            f"partial_rotary_factor = {turned!r} with rope type {rope!r}; supported: 1 (whole heads are rotated)"
        )


def key_value_heads(parsed: Any) -> int:
    """How many key heads a layer has."""
    return int(getattr(parsed, "num_key_value_heads", None) or parsed.num_attention_heads)


def head_width(parsed: Any) -> int:
    """The width of one head."""
    return int(getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads)


def max_positions(family: CausalFamily, config: Config) -> int | None:
    """The longest text that the model supports."""
    return getattr(read_config(family, config), "max_position_embeddings", None)


def vocab_size(family: CausalFamily, config: Config) -> int:
    """The number of token ids, used or not."""
    return int(read_config(family, config).vocab_size)


def rotary_shape(family: CausalFamily, config: Config) -> RotaryShape:
    """The sizes of the network of a family with rotary positions; ValueError as read_config."""
    parsed = read_config(family, config)
    with fitting(family.name):
        return _rotary_shape(family, parsed)


def _rotary_shape(family: CausalFamily, parsed: Any) -> RotaryShape:
    mixture, dense = None, frozenset[int]()
    if family.config_class == "Qwen3MoeConfig":
        layers = range(parsed.num_hidden_layers)
        dense = frozenset(layer for layer in layers if _is_dense(family.model_class, parsed, layer))
        mixture = MixtureShape(
            num_experts=parsed.num_experts,
            num_chosen=parsed.num_experts_per_tok,
            inner=parsed.moe_intermediate_size,
            normalise=parsed.norm_topk_prob,
        )
    return RotaryShape(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_hidden_layers=parsed.num_hidden_layers,
        num_attention_heads=parsed.num_attention_heads,
        num_key_value_heads=key_value_heads(parsed),
        head_dim=head_width(parsed),
        rotary_dim=head_width(parsed),
        rms_norm_eps=parsed.rms_norm_eps,
        rope=parsed.rope_parameters,
        max_position_embeddings=parsed.max_position_embeddings,
        windows=family.windows(parsed),
        hidden_act=parsed.hidden_act,
        tied=parsed.tie_word_embeddings,
        mixture=mixture,
        dense=dense,
    )


# ---- its tensors -------------------------------------------------------------------------------------------------


def weight_shapes(family: CausalFamily, config: Config) -> Shapes:
    """Name every tensor that a checkpoint must have, with its shape; a tied output layer is not one of them."""
    parsed = read_config(family, config)
    shapes = shapes_of(family.model_class, parsed)
    if parsed.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def optional_names(family: CausalFamily, config: Config) -> set[str]:
    """Name the tensors that a checkpoint may have besides."""
    parsed = read_config(family, config)
    names = {buffer.format(layer) for buffer in family.buffers for layer in range(parsed.num_hidden_layers)}
    return names | ({"lm_head.weight"} if parsed.tie_word_embeddings else set())


def full_names(family: CausalFamily, names: Iterable[str]) -> dict[str, str]:
    """Map a checkpoint's names to full ones; those of a bare base model (public GPT-2) lack the prefix."""
    names = list(names)
    if any(name.startswith(family.prefix) for name in names):
        return {name: name for name in names}
    return {name: name if name.startswith("lm_head.") else family.prefix + name for name in names}


# Which attention products have a bias: (queries, keys and values; the output).
_BIASES: Final = {
    "LlamaForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
    "MistralForCausalLM": lambda parsed: (False, False),
    "Qwen2ForCausalLM": lambda parsed: (True, False),
    "Qwen3ForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
    "Qwen3MoeForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
}


def shapes_of(model_class: str, parsed: Any) -> Shapes:
    """Every tensor of a model, the output layer included though it may be tied; `parsed` as read_fields returns it."""
    vocab, width = parsed.vocab_size, parsed.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for layer in range(parsed.num_hidden_layers):
        parts = _attention(model_class, parsed) | _inner(model_class, parsed, layer)
        parts |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes | {"lm_head.weight": (vocab, width)}


def _attention(model_class: str, parsed: Any) -> Shapes:
    width, head = parsed.hidden_size, head_width(parsed)
    outer, keys = parsed.num_attention_heads * head, parsed.num_key_value_heads * head
    biased, output_biased = _BIASES[model_class](parsed)
    shapes: Shapes = {}
    for name, num_out in (("q", outer), ("k", keys), ("v", keys)):
        shapes |= product_shapes(f"self_attn.{name}_proj", num_out, width, bias=biased)
    shapes |= product_shapes("self_attn.o_proj", width, outer, bias=output_biased)
    if model_class.startswith("Qwen3"):
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


def _inner(model_class: str, parsed: Any, layer: int) -> Shapes:
    """The feed-forward network: dense, or the experts of decoders/backbones/moe.py."""
    width = parsed.hidden_size
    if _is_dense(model_class, parsed, layer):
        return gated_shapes("mlp", width, parsed.intermediate_size, bias=getattr(parsed, "mlp_bias", False) is True)
    shapes: Shapes = {"mlp.gate.weight": (parsed.num_experts, width)}
    for expert in range(parsed.num_experts):
        shapes |= gated_shapes(f"mlp.experts.{expert}", width, parsed.moe_intermediate_size)
    return shapes


def _is_dense(model_class: str, parsed: Any, layer: int) -> bool:
    has_experts = model_class == "Qwen3MoeForCausalLM" and layer not in parsed.mlp_only_layers
    return not has_experts or (layer + 1) % parsed.decoder_sparse_step > 0


def gated_shapes(prefix: str, width: int, inner: int, *, bias: bool = False) -> Shapes:
    """The tensors of a network down(activation(gate(x)) * up(x)) under this name."""
    shapes = product_shapes(f"{prefix}.down_proj", width, inner, bias=bias)
    for name in ("gate_proj", "up_proj"):
        shapes |= product_shapes(f"{prefix}.{name}", inner, width, bias=bias)
    return shapes


def product_shapes(name: str, num_out: int, num_in: int, *, bias: bool = True) -> Shapes:
    """The tensors of a linear layer."""
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    if bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes
