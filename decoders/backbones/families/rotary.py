"""The sizes of a rotary network (network.py): what decides its numbers, in one form for all of its families.

Imports no torch; families/ fills it in from config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ACTIVATIONS: Final = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Those between the products of a feed-forward network, by transformers' names."""


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
    the output layer may be the embeddings.
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

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads and {self.num_key_value_heads} key heads do not divide evenly"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act = {self.hidden_act!r}; supported: {', '.join(ACTIVATIONS)}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of what products give, each of those that are joined by itself."""
        heads = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        mixture = self.mixture
        inner = () if mixture is None else (mixture.inner, *([mixture.shared] if mixture.shared else []))
        is_dense = mixture is None or self.dense
        return (*heads, self.hidden_size, *inner, *([self.intermediate_size] if is_dense else []))
