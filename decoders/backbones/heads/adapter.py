"""A LoRA adapter that rows of masks alone take: it makes a plain causal model draft as I-DLM does, and leaves its text alone.

    row of          the  cat  M    M
    a product has   Wx   Wx   Wx + BAx      the others to the bit as without it

Source: Yu et al., "Introspective diffusion language models" (I-DLM), 2026. Legend: P rows with padding, K in, M out, R the summed
ranks of the products that are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones import checkpoint
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.heads.files import ADAPTER_WEIGHTS, read_adapter
from draftmill.decoders.backbones.load import check_finite
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.packed import product_kind

_PATH: Final = "decoder.drafter.path"
_JOINED: Final = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


class AdaptedProduct(nn.Module):
    """A product [P, K] -> [P, M]; `rows.is_mask_P1` says which rows take the change by `down` and `up`."""

    def __init__(self, product: Any, down: Callable[..., Any], up: Callable[..., Any], rows: Any) -> None:
        super().__init__()
        self.product, self.down, self.up, self.rows = product, down, up, rows

    def forward(self, rows_PK: Tensor) -> Tensor:
        out_PM: Tensor = self.product(rows_PK)
        return torch.where(self.rows.is_mask_P1, out_PM + self.up(self.down(rows_PK)), out_PM)


def adapt_masks(backbone: Any, folder: Path, mask_id: int | None) -> RotaryBackbone:
    """Give the mask's rows of a model the adapter in `folder`; ValueError as read_adapter, or where others run its layers."""
    if not isinstance(backbone, RotaryBackbone):
        raise ValueError(f"{_PATH}: {folder} adapts masks, of a model in one process and of our own network alone")
    network, sizes = backbone.base, backbone.base.shape.tensors()
    scale, how = read_adapter(folder, network.shape), Running(backbone.dtype, backbone.device, backbone.exact)
    weights = checkpoint.file_tensors(
        folder / ADAPTER_WEIGHTS, lambda file, name: file.get_tensor(name).to(how.device, how.dtype), "pt", _PATH
    )
    check_finite(weights, folder / ADAPTER_WEIGHTS, _PATH)
    if not any(tensor.any() for name, tensor in weights.items() if ".lora_B." in name):
        raise ValueError(
            f"{_PATH}: {folder / ADAPTER_WEIGHTS} changes nothing: each lora_B is zero, as before a training"
        )
    rows, kind = SimpleNamespace(is_mask_P1=None), product_kind(how) or _linear
    none = partial(torch.zeros, dtype=how.dtype, device=how.device)
    for index, layer in enumerate(network.layers):
        for joined, parts in _JOINED.items():
            downs, ups = list[Tensor](), list[Tensor]()
            for part in parts:  # one that is not adapted has no ranks
                name = f"model.layers.{index}.{part}"
                num_out, num_in = sizes[f"{name}.weight"]
                downs.append(weights.get(f"base_model.model.{name}.lora_A.weight", none(0, num_in)))
                ups.append(weights.get(f"base_model.model.{name}.lora_B.weight", none(num_out, 0)))
            if any(map(len, downs)):
                down_RK = network.turned_in(index, joined, torch.cat(downs))
                up_MR = network.turned_out(joined, torch.block_diag(*ups) * scale)
                down, up = (kind(weight.to(how.dtype), None) for weight in (down_RK, up_MR))
                setattr(layer, joined, AdaptedProduct(getattr(layer, joined), down, up, rows))

    def note(_: Any, arguments: Any) -> None:
        rows.is_mask_P1 = (arguments[0] == mask_id).unsqueeze(1)

    network.register_forward_pre_hook(note)
    backbone.bind()
    return backbone


def _linear(weight_MK: Tensor, bias_M: None) -> Callable[[Tensor], Tensor]:
    return lambda rows_PK: nn.functional.linear(rows_PK, weight_MK, bias_M)
