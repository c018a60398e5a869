"""The sizes of a LLaDA2 network from config.json, and the tensors of its checkpoints.

A row sees exactly what the caller allows. The released code adds a mask of zeros and ones to the scores, which hides nothing.

Pure tables and checks over a config dict; reads no weights and imports no torch. Source: the model file and the configs of the
checkpoints of LLaDA2.0 (Bie et al., 2025) and 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from draftmill.decoders.backbones.families.causal import Config, Shapes, gated_shapes
from draftmill.decoders.backbones.families.config_fields import demand, fitting, numbers
from draftmill.decoders.backbones.families.rotary import MixtureShape, RotaryShape

if TYPE_CHECKING:
    from torch import Tensor


_SAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_COUNTS: Final = (*_SAME, "num_experts", "num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size")
_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
    "use_qkv_bias": (False,),
    "use_bias": (False,),
    "use_rmsnorm": (True,),
    "using_split_qkv_in_self_attention": (False,),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "norm_topk_prob": (True,),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "tie_word_embeddings": (False,),
    "quantization_config": (None,),
}
_TURNED: Final = 0.5


def llada2_shape(config: Config) -> RotaryShape:
    """Read a LLaDA2 config; ValueError names the first missing, invalid or unsupported field."""
    counts = numbers(config, {key: key for key in _COUNTS}, "llada2")
    heads, width = counts["num_attention_heads"], counts["hidden_size"]
    own = config.get("head_dim") is not None
    head_dim = numbers(config, {"head_dim": "head_dim"}, "llada2")["head_dim"] if own else width // heads
    with fitting("llada2"):
        demand(config, _BUILT)
        config = _with_rope_parameters(config)
        same: dict[str, Any] = {key: counts[key] for key in _SAME}
        return RotaryShape(
            **same,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(config, head_dim),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rope={"rope_theta": _positive(config, "rope_theta")},
            windows=(None,) * counts["num_hidden_layers"],
            mixture=_mixture(config, counts),
            dense=frozenset(range(_from_zero(config, "first_k_dense_replace"))),
        )


def _mixture(config: Config, counts: Mapping[str, int]) -> MixtureShape:
    count, chosen = counts["num_experts"], counts["num_experts_per_tok"]
    groups, kept = counts["n_group"], counts["topk_group"]
    each = count // groups
    if count % groups or each < 2 or kept > groups:
        raise ValueError(
            f"{count} experts in n_group = {groups}, of which topk_group = {kept} are kept; allowed: equal groups of at least 2, "
            "no more kept than there are"
        )
    if chosen > kept * each:
        raise ValueError(f"num_experts_per_tok = {chosen}; {kept} groups of {each} have fewer experts")
    inner = counts["moe_intermediate_size"]
    return MixtureShape(
        num_experts=count,
        num_chosen=chosen,
        inner=inner,
        groups=(groups, kept),
        scale=_positive(config, "routed_scaling_factor"),
        shared=_from_zero(config, "num_shared_experts") * inner,
    )


def _with_rope_parameters(config: Config) -> Config:
    """Take `rope_theta` and `partial_rotary_factor` from `rope_parameters` (newer configs); ValueError on a contradiction."""
    rope = config.get("rope_parameters") or {}
    demand({"rope_parameters.rope_type": rope.get("rope_type", "default")}, {"rope_parameters.rope_type": ("default",)})
    inner = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    for key, value in inner.items():
        if config.get(key, value) != value:
            raise ValueError(f"it has {key} = {config[key]!r}, but {value!r} in rope_parameters")
    return {**config, **inner}


def _rotary_dim(config: Config, head_dim: int) -> int:
    """The rotated dimensions of a head; two fields may give them, the public code reads only the factor."""
    turned = int(head_dim * _positive({"partial_rotary_factor": _TURNED} | dict(config), "partial_rotary_factor"))
    if config.get("rotary_dim") not in {None, turned}:
        raise ValueError(f"it has rotary_dim = {config['rotary_dim']!r}, but partial_rotary_factor makes it {turned}")
    if turned % 2 or not 0 < turned <= head_dim:
        raise ValueError(
            f"rotary dimension {turned} of head dimension {head_dim}; allowed: even numbers up to the head dimension"
        )
    return turned


def _from_zero(config: Config, key: str) -> int:
    value = config.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"it has {key} = {value!r}; allowed: whole numbers >= 0")
    return value


def _positive(config: Config, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"it has {key} = {value!r}; allowed: numbers > 0")
    return float(value)


def llada2_shapes(config: Config) -> Shapes:
    """Name every tensor of a LLaDA2 checkpoint, with its shape."""
    shape = llada2_shape(config)
    width, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    joined = heads + 2 * shape.num_key_value_heads * shape.head_dim
    shapes: Shapes = {
        "model.word_embeddings.weight": (shape.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (shape.vocab_size, width),
    }
    for layer in range(shape.num_hidden_layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        shapes |= {f"{block}attention.{norm}_layernorm.weight": (shape.head_dim,) for norm in ("query", "key")}
        shapes[block + "attention.query_key_value.weight"] = (joined, width)
        shapes[block + "attention.dense.weight"] = (width, heads)
        if layer in shape.dense:
            shapes |= gated_shapes(block + "mlp", width, shape.intermediate_size)
        else:
            assert shape.mixture is not None, "its layers have experts"
            shapes |= _mixture_shapes(block + "mlp.", width, shape.mixture)
    return shapes


def _mixture_shapes(prefix: str, width: int, mixture: MixtureShape) -> Shapes:
    count = mixture.num_experts
    shapes: Shapes = {prefix + "gate.weight": (count, width), prefix + "gate.expert_bias": (count,)}
    for expert in range(count):
        shapes |= gated_shapes(f"{prefix}experts.{expert}", width, mixture.inner)
    return shapes | (gated_shapes(f"{prefix}shared_experts", width, mixture.shared) if mixture.shared else {})


_NAMES: Final = {
    "word_embeddings": "embed_tokens",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm",
}


def llada2_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give LLaDA2's weights the names of transformers' Llama."""
    ready: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        theirs = next((theirs for theirs in _NAMES if f".{theirs}." in name), "")
        ready[name.replace(f".{theirs}.", f".{_NAMES[theirs]}.") if theirs else name] = tensor
    return ready
