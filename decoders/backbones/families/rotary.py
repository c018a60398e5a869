"""The sizes of a rotary network (network.py), in one form for all of its families, and the tensors of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Shapes = dict[str, tuple[int, ...]]
ACTIVATIONS: Final = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""The supported activations of feed-forward networks, by transformers' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """A mixture of `num_experts` networks of width `inner`; a row asks `num_chosen` of them.

    Without `groups` the router is that of Qwen3-MoE, whose weights sum up to one if `normalise`. With `groups` (their number, and
    how many are kept) it is that of LLaDA2: weights sum up to `scale`, and every row also asks a network of width `shared`
    if that is not 0.
    """

    num_experts: int
    num_chosen: int
    inner: int
    normalise: bool = False
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryShape:
    """The sizes of a rotary network, named as in transformers' configs.

    Positions rotate the first `rotary_dim` numbers of a head, by the settings `rope` of config.json. `windows` has one entry a
    layer: how many positions back it sees, its own included; None for all. Layers in `dense` have no mixture. `tied` says that
    the output layer may be the embeddings. Products of queries, keys and values, of the attention's output, and of the
    feed-forward network have biases where `qkv_bias`, `output_bias` and `inner_bias` say so; with `head_norms` queries and keys
    are normed. A checkpoint may have queries, keys and values in one tensor (`is_joined`). Texts are at most `longest` tokens,
    or `max_position_embeddings` without it; longer ones are refused if `is_bounded`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    tied: bool = False
    mixture: MixtureShape | None = None
    dense: frozenset[int] = frozenset()
    qkv_bias: bool = False
    output_bias: bool = False
    inner_bias: bool = False
    head_norms: bool = False
    is_joined: bool = False
    longest: int | None = None
    is_bounded: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads and {self.num_key_value_heads} key heads do not divide evenly"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act = {self.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary dimension {self.rotary_dim} of head dimension {self.head_dim}; allowed: even numbers up to the head "
                "dimension"
            )

    @property
    def has_groups(self) -> bool:
        """Whether its mixture chooses groups of experts first: then its router computes in float32 or better."""
        return self.mixture is not None and self.mixture.groups is not None

    @property
    def can_turn(self) -> bool:
        """Whether outliers of states and of heads can spread over 16 numbers at least (small_weights.py, turn_rows)."""
        return self.mixture is None and (self.hidden_size | self.head_dim) % 16 == 0

    @property
    def max_length(self) -> int:
        return self.longest or self.max_position_embeddings

    @property
    def widths(self) -> tuple[int, ...]:
        """The output widths of the products, where joined products count one by one."""
        heads = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        mixture = self.mixture
        inner = () if mixture is None else (mixture.inner, *([mixture.shared] if mixture.shared else []))
        is_dense = mixture is None or self.dense
        return (*heads, self.hidden_size, *inner, *([self.intermediate_size] if is_dense else []))

    def optional(self) -> set[str]:
        return {"lm_head.weight"} if self.tied else set()

    def tensors(self) -> Shapes:
        """Every tensor that a checkpoint must have, with its shape; names are those of transformers' Llama and Qwen3-MoE."""
        width, vocab = self.hidden_size, self.vocab_size
        shapes: Shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
        for layer in range(self.num_hidden_layers):
            is_dense = self.mixture is None or layer in self.dense
            parts = self._attention() | (self._gated("mlp", self.intermediate_size) if is_dense else self._experts())
            parts |= {f"{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
            shapes |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
        return shapes if self.tied else shapes | {"lm_head.weight": (vocab, width)}

    def _attention(self) -> Shapes:
        outer, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        rows = {"qkv_proj": outer + 2 * keys} if self.is_joined else {"q_proj": outer, "k_proj": keys, "v_proj": keys}
        shapes = product_shapes("self_attn.o_proj", self.hidden_size, outer, bias=self.output_bias)
        for name, num_out in rows.items():
            shapes |= product_shapes(f"self_attn.{name}", num_out, self.hidden_size, bias=self.qkv_bias)
        norms = ("q_norm", "k_norm") if self.head_norms else ()
        return shapes | {f"self_attn.{norm}.weight": (self.head_dim,) for norm in norms}

    def _gated(self, prefix: str, inner: int) -> Shapes:
        shapes = product_shapes(f"{prefix}.down_proj", self.hidden_size, inner, bias=self.inner_bias)
        for name in ("gate_proj", "up_proj"):
            shapes |= product_shapes(f"{prefix}.{name}", inner, self.hidden_size, bias=self.inner_bias)
        return shapes

    def _experts(self) -> Shapes:
        mixture = self.mixture
        assert mixture is not None, "a layer that is not dense has experts"
        shapes: Shapes = {"mlp.gate.weight": (mixture.num_experts, self.hidden_size)}
        if mixture.groups is not None:
            shapes["mlp.gate.expert_bias"] = (mixture.num_experts,)
        for expert in range(mixture.num_experts):
            shapes |= self._gated(f"mlp.experts.{expert}", mixture.inner)
        return shapes | (self._gated("mlp.shared_experts", mixture.shared) if mixture.shared else {})


def product_shapes(name: str, num_out: int, num_in: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    return shapes | {f"{name}.bias": (num_out,)} if bias else shapes
