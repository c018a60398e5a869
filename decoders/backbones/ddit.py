"""The diffusion transformer of MDLM and SEDD (DDiT) in plain torch, over the slot cache.

Every row sees the columns that its mask allows, in both directions. A small network maps the noise sigma to the modulation: it
scales and shifts a row's norms and gates its residuals. Sigma belongs to a canvas (`TokenRows.sigma_G`), so that canvases at
different times share a forward; cached keys and values keep the sigma that they were computed with. A network trained without
sigma is the same network at sigma = 0; its modulation is computed once.

Rows return their final modulated states; `logits` are the raw outputs, the mask's included. decoders/draws/schedule.py turns
them into probabilities.

Precision as in the public code: in half precision the residual stream, the norms and the conditioning stay in float32.
Sources: Peebles & Xie, "Scalable Diffusion Models with Transformers" (2022), as SEDD and MDLM changed it for text.

Legend: U sigmas, C condition width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.attention import AnyLayout, Scores, attend_rows
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.masked import DDiTShape
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.backbones.transformer import NetworkBackbone

_HEAD: Final = "output_layer.linear."
_PERIOD: Final = 10000.0


class _SigmaMap(nn.Module):
    """From sigma to the condition: 256 sinusoids through two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma_U: Tensor) -> Tensor:
        steps = torch.arange(128, dtype=sigma_U.dtype, device=sigma_U.device)
        angle = sigma_U.unsqueeze(1) * torch.exp(-math.log(_PERIOD) / 128 * steps)
        return functional.silu(self.mlp(torch.cat([angle.cos(), angle.sin()], dim=1)))


class _Block(nn.Module):
    def __init__(self, index: int, shape: DDiTShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.layer_idx, self.num_heads = index, shape.num_attention_heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Linear(shape.cond_dim, 6 * width)

    def forward(
        self, states_ND: Tensor, turn_2Nd: tuple[Tensor, Tensor], parts: tuple[Tensor, ...], layout: AnyLayout
    ) -> Tensor:
        dtype = layout.cache.dtype
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = parts
        inner_ND = _modulate(self.norm1(states_ND), shift_1, scale_1).to(dtype)
        states_ND = states_ND + gate_1 * self._attend(inner_ND, turn_2Nd, layout)
        inner_ND = _modulate(self.norm2(states_ND), shift_2, scale_2).to(dtype)
        return states_ND + gate_2 * self.mlp(inner_ND)

    def _attend(self, inner_ND: Tensor, turn_2Nd: tuple[Tensor, Tensor], layout: AnyLayout) -> Tensor:
        heads_N3Hd = self.attn_qkv(inner_ND).view(inner_ND.shape[0], 3, self.num_heads, -1)
        query_NHd, key_NHd = (_turn(heads_N3Hd[:, index], turn_2Nd) for index in range(2))
        key_value_NXd, scaling = torch.cat([key_NHd, heads_N3Hd[:, 2]], 1), query_NHd.shape[2] ** -0.5
        mixed_NHd = attend_rows(self.layer_idx, query_NHd, key_value_NXd, scores=Scores(scaling), layout=layout)
        return self.attn_out(mixed_NHd.flatten(1))


def _modulate(rows_ND: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return rows_ND * (1 + scale) + shift


def _turn(rows_NHd: Tensor, turn_2Nd: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position encoding, the halves of a head as partners."""
    cosine_N1d, sine_N1d = (part.unsqueeze(1) for part in turn_2Nd)
    rows = rows_NHd.to(cosine_N1d.dtype)
    first, second = rows.chunk(2, dim=-1)
    return (rows * cosine_N1d + torch.cat([-second, first], dim=-1) * sine_N1d).to(rows_NHd.dtype)


def _spread(rows_U: Tensor, which_N: Tensor | None, count: int) -> tuple[Tensor, ...]:
    """Give every flat row its modulation, cut into `count` parts."""
    return (rows_U if which_N is None else rows_U[which_N]).chunk(count, dim=1)


class _Final(nn.Module):
    def __init__(self, shape: DDiTShape) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(shape.hidden_size, bias=False)
        self.adaLN_modulation = nn.Linear(shape.cond_dim, 2 * shape.hidden_size)


class DDiT(nn.Module):
    """All but the output layer, nearly under the checkpoints' names."""

    def __init__(self, shape: DDiTShape) -> None:
        super().__init__()
        self.head_width = shape.hidden_size // shape.num_attention_heads
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.sigma_map = _SigmaMap(shape.cond_dim)
        self.blocks = nn.ModuleList(_Block(index, shape) for index in range(shape.num_hidden_layers))
        self.output_layer = _Final(shape)

    def modulations(self, sigma_U: Tensor) -> list[Tensor]:
        """The modulation of every block, [U, 6 D] each, and last of the output layer, [U, 2 D]."""
        condition_UC = self.sigma_map(sigma_U)
        return [layer.adaLN_modulation(condition_UC) for layer in (*self.blocks, self.output_layer)]

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        layout: AnyLayout,
        modulations: list[Tensor],
        which_N: Tensor | None,
    ) -> Tensor:
        """Run flat rows; row n uses row `which_N[n]` of each modulation; None if there is only one. Final states [N, D]."""
        states_ND = self.word_embeddings(tokens_N)
        half = torch.arange(0, self.head_width, 2, dtype=states_ND.dtype, device=states_ND.device)
        angle = positions_N.to(states_ND.dtype).unsqueeze(1) * _PERIOD ** (-half / self.head_width)
        angle_Nd = torch.cat([angle, angle], dim=1)
        turn_2Nd = angle_Nd.cos(), angle_Nd.sin()
        for block, rows_U in zip(self.blocks, modulations[:-1], strict=True):
            states_ND = block(states_ND, turn_2Nd, _spread(rows_U, which_N, 6), layout)
        shift, scale = _spread(modulations[-1], which_N, 2)
        return _modulate(self.output_layer.norm_final(states_ND), shift, scale)


class DDiTBackbone(NetworkBackbone):
    """See the module's docstring. If `takes_sigma`, the rows need `sigma_G`; otherwise it is ignored."""

    def __init__(self, shape: DDiTShape, weights: Mapping[str, Tensor], how: Running) -> None:
        self.takes_sigma = shape.takes_sigma
        self.exact_dtype = torch.float64 if how.dtype == torch.float64 else torch.float32
        ready = dict[str, Tensor]()
        for name, tensor in weights.items():
            is_head = name.startswith(_HEAD)
            is_inner = name.startswith("blocks.") and (".attn_" in name or ".mlp." in name)
            own = name.replace("vocab_embed.embedding", "word_embeddings.weight").removeprefix(_HEAD)
            # The large products run in the model's dtype.
            dtype = how.dtype if is_head or is_inner else self.exact_dtype
            ready[f"{'lm_head' if is_head else 'model'}.{own}"] = tensor.to(device=how.device, dtype=dtype)
        super().__init__(DDiT, shape, ready, how)
        self._at_zero = self.base.modulations(torch.zeros(1, dtype=self.exact_dtype, device=self.device))

    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        modulations, which_P = self._at_zero, None
        if self.takes_sigma:
            assert rows.sigma_G is not None, "this network is conditioned on the noise: its rows need sigma_G"
            count = rows.sigma_G.shape[0]
            padded_U = functional.pad(rows.sigma_G.to(self.exact_dtype), (0, self._padded(count) - count))
            modulations = [part[:count] for part in self.base.modulations(padded_U)]
            which_P = self._pad(rows.owner_N) if count > 1 else None
        return self.base(tokens_P, positions_P, layout, modulations, which_P).to(self.dtype)
