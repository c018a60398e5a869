"""GPT-Neo's attention through transformers' attention interface, which GPT-Neo's own code does not use.

Source: transformers' GPTNeoForCausalLM. Legend: N rows, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class GPTNeoAttention(nn.Module):
    """Replaces the attention of one layer, with the same weights under the same names. Scores are not scaled, and local layers
    have a window. `given` are the keyword arguments for attention: GPT-Neo's blocks pass none."""

    is_causal = True

    def __init__(self, own: Any, given: dict[str, Any]) -> None:
        super().__init__()
        self.attention, self.layer_idx, self.given = own.attention, own.layer_id, given
        self.attention.bias = None  # its mask of all positions, a few MiB a layer
        self.window = own.attention.config.window_size if own.attention_type == "local" else None

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the attention's output, and no attention weights."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own: Any = self.attention
        products = own.q_proj, own.k_proj, own.v_proj
        heads_1HNd = (own._split_heads(product(hidden_states), own.num_heads, own.head_dim) for product in products)
        attend = ALL_ATTENTION_FUNCTIONS[own.config._attn_implementation]
        mixed_1NHd, _ = attend(self, *heads_1HNd, None, scaling=1.0, sliding_window=self.window, **self.given)
        return own.out_proj(mixed_1NHd.flatten(2)), None


def use_interface(model: Any) -> None:
    """Let a GPT-Neo use the interface, with the `layout` that its stack is called with; other models stay as they are."""
    if model.config.model_type != "gpt_neo":
        return
    base, given = model.get_decoder(), dict[str, Any]()
    plain = base.forward
    for block in base.h:
        block.attn = GPTNeoAttention(block.attn, given)

    def forward(*, layout: Any, **rows: Any) -> Any:
        given["layout"] = layout
        return plain(**rows)

    base.forward = forward
