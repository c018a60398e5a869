"""LLaDA2's network in plain torch over the slot cache: a mixture of experts under block diffusion.

Queries, keys and values come from one product, queries and keys are normed per head and rotated on the first part of their
width only; the first layers are dense, the others mixtures (moe.py). A row sees exactly what the caller's mask allows: the
released code gives transformers a mask of zeros and ones, which is added to the scores and hides nothing; here hidden is
hidden, as the models were trained.

Norms, rotations, routers and the sums of experts run in float32 or better, as in the released code; logits are float32 or
better. Source: LLaDA2.0 (Bie et al., 2025) and the model file of its checkpoints.

Legend: K key heads, r turned width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones.attention import AnyLayout, Scores, attend_rows
from draftmill.decoders.backbones.families.llada2 import LLaDA2Shape
from draftmill.decoders.backbones.moe import GatedMLP, SigmoidMixture
from draftmill.decoders.backbones.transformer import NetworkBackbone


class _Norm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 or better."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = epsilon  # transformers' name for it, by which such a norm is known

    def forward(self, rows: Tensor) -> Tensor:
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * exact.to(rows.dtype)


class _Attention(nn.Module):
    def __init__(self, index: int, shape: LLaDA2Shape) -> None:
        super().__init__()
        self.layer_idx, self.rotary_dim = index, shape.rotary_dim
        self.heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        self.query_key_value = nn.Linear(shape.hidden_size, sum(self.heads) * shape.head_dim, bias=False)
        self.query_layernorm, self.key_layernorm = (_Norm(shape.head_dim, shape.rms_norm_eps) for _ in range(2))
        self.dense = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, rows_ND: Tensor, turn_2Nd: tuple[Tensor, Tensor], layout: AnyLayout) -> Tensor:
        heads_Nxd = self.query_key_value(rows_ND).unflatten(1, (sum(self.heads), -1))
        query_NHd, key_NKd, value_NKd = heads_Nxd.split(self.heads, dim=1)
        query_NHd = self._turn(self.query_layernorm(query_NHd), turn_2Nd)
        key_NKd = self._turn(self.key_layernorm(key_NKd), turn_2Nd)
        key_value_NXd, scaling = torch.cat([key_NKd, value_NKd], 1), query_NHd.shape[2] ** -0.5
        mixed_NHd = attend_rows(self.layer_idx, query_NHd, key_value_NXd, scores=Scores(scaling), layout=layout)
        mixed_ND: Tensor = self.dense(mixed_NHd.flatten(1))
        return mixed_ND

    def _turn(self, rows_Nxd: Tensor, turn_2Nd: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary position encoding of the first r numbers, whose halves are partners; the rest has angle 0."""
        cosine_N1d, sine_N1d = (part.unsqueeze(1) for part in turn_2Nd)
        first, second = rows_Nxd[..., : self.rotary_dim].chunk(2, dim=-1)
        partner_Nxd = torch.cat([-second, first, rows_Nxd[..., self.rotary_dim :]], dim=-1)
        return rows_Nxd * cosine_N1d + partner_Nxd * sine_N1d


class _Layer(nn.Module):
    def __init__(self, index: int, shape: LLaDA2Shape) -> None:
        super().__init__()
        width, epsilon = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (_Norm(width, epsilon) for _ in range(2))
        self.attention = _Attention(index, shape)
        dense = index < shape.first_k_dense_replace
        self.mlp = GatedMLP(width, shape.intermediate_size) if dense else _mixture(shape)

    def forward(self, rows_ND: Tensor, turn_2Nd: tuple[Tensor, Tensor], layout: AnyLayout) -> Tensor:
        rows_ND = rows_ND + self.attention(self.input_layernorm(rows_ND), turn_2Nd, layout)
        out_ND: Tensor = rows_ND + self.mlp(self.post_attention_layernorm(rows_ND))
        return out_ND


def _mixture(shape: LLaDA2Shape) -> SigmoidMixture:
    return SigmoidMixture(
        shape.hidden_size,
        shape.moe_intermediate_size,
        num_experts=shape.num_experts,
        num_chosen=shape.num_experts_per_tok,
        groups=(shape.n_group, shape.topk_group),
        scale=shape.routed_scaling_factor,
        shared=shape.num_shared_experts * shape.moe_intermediate_size,
    )


class LLaDA2(nn.Module):
    """All but the output layer, under the checkpoints' names."""

    def __init__(self, shape: LLaDA2Shape) -> None:
        super().__init__()
        self.shape = shape
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(index, shape) for index in range(shape.num_hidden_layers))
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, layout: AnyLayout) -> Tensor:
        """Run flat rows; final normed states [N, D]."""
        rows_ND = self.word_embeddings(tokens_N)
        turn_2Nd = self._turns(positions_N, rows_ND.dtype)
        for layer in self.layers:
            rows_ND = layer(rows_ND, turn_2Nd, layout)
        states_ND: Tensor = self.norm(rows_ND)
        return states_ND

    def _turns(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every row's angles, over a whole head, [N, d] each."""
        shape, exact = self.shape, torch.promote_types(dtype, torch.float32)
        steps_h = torch.arange(0, shape.rotary_dim, 2, device=positions_N.device).to(exact) / shape.rotary_dim
        frequency_h = 1.0 / shape.rope_theta**steps_h
        still = frequency_h.new_zeros(shape.head_dim - shape.rotary_dim)
        angle_Nd = positions_N.to(exact).unsqueeze(1) * torch.cat([frequency_h, frequency_h, still])
        return angle_Nd.cos().to(dtype), angle_Nd.sin().to(dtype)


class LLaDA2Backbone(NetworkBackbone):
    """See the module's docstring. `weights` are the checkpoint's tensors by name, already checked for completeness; they are
    removed from the dict."""

    def __init__(
        self,
        shape: LLaDA2Shape,
        weights: dict[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        exact: bool = False,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        ready = {
            name.replace(".gate.expert_bias", ".expert_bias"): weights.pop(name).to(
                device=device, dtype=wide if ".mlp.gate." in name else dtype
            )
            for name in list(weights)
        }
        super().__init__(LLaDA2, shape, ready, dtype=dtype, device=device, exact=exact)
