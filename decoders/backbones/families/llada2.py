"""The sizes of a LLaDA2 network from config.json, and the tensors of its checkpoints.

Pure tables and checks over a config dict; reads no weights and imports no torch. Source: the model file and the configs of the
checkpoints of LLaDA2.0 (Bie et al., 2025) and 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from draftmill.decoders.backbones.families.causal import Config, Shapes, gated_shapes
from draftmill.decoders.backbones.families.config_fields import demand, fitting, numbers


@dataclass(frozen=True, slots=True)
class LLaDA2Shape:
    """The sizes of a LLaDA2 network, named as in config.json. The first `rotary_dim` dimensions of a head are rotated. Of the
    `n_group` groups of experts a row keeps `topk_group`, and chooses `num_experts_per_tok` experts in them.
    `num_shared_experts` may be 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    max_position_embeddings: int
    num_shared_experts: int
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    routed_scaling_factor: float

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads and {self.num_key_value_heads} key heads do not divide evenly"
            )
        each = self.num_experts // self.n_group
        if self.num_experts % self.n_group or each < 2 or self.topk_group > self.n_group:
            raise ValueError(
                f"{self.num_experts} experts in n_group = {self.n_group}, of which topk_group = {self.topk_group} are kept; "
                "allowed: equal groups of at least 2, no more kept than there are"
            )
        if self.num_experts_per_tok > self.topk_group * each:
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok}; {self.topk_group} groups of {each} have fewer experts"
            )


_COUNTS: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "num_experts", "num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size", "max_position_embeddings",
)  # fmt: skip
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


def llada2_shape(config: Config) -> LLaDA2Shape:
    """Read a LLaDA2 config; ValueError names the first missing, invalid or unsupported field."""
    counts = numbers(config, {key: key for key in _COUNTS}, "llada2")
    heads, width = counts["num_attention_heads"], counts["hidden_size"]
    own = config.get("head_dim") is not None
    head_dim = numbers(config, {"head_dim": "head_dim"}, "llada2")["head_dim"] if own else width // heads
    with fitting("llada2"):
        demand(config, _BUILT)
        config = _with_rope_parameters(config)
        return LLaDA2Shape(
            **counts,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(config, head_dim),
            num_shared_experts=_from_zero(config, "num_shared_experts"),
            first_k_dense_replace=_from_zero(config, "first_k_dense_replace"),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rope_theta=_positive(config, "rope_theta"),
            routed_scaling_factor=_positive(config, "routed_scaling_factor"),
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
        if layer < shape.first_k_dense_replace:
            shapes |= gated_shapes(block + "mlp", width, shape.intermediate_size)
        else:
            shapes |= _mixture(block + "mlp.", shape)
    return shapes


def _mixture(prefix: str, shape: LLaDA2Shape) -> Shapes:
    width, inner, count = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    shapes: Shapes = {prefix + "gate.weight": (count, width)}
    shapes[prefix + "gate.expert_bias"] = (count,)
    for expert in range(count):
        shapes |= gated_shapes(f"{prefix}experts.{expert}", width, inner)
    shared = shape.num_shared_experts * inner
    return shapes | (gated_shapes(f"{prefix}shared_experts", width, shared) if shared else {})
