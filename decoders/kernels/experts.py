"""Products of rows with the weights of their experts on a GPU: experts_reference.py by torch's grouped product, or in Triton.

torch's product is taken where its fast form is known to exist (bfloat16 on Hopper); its other forms read the ends
back to the host, which would wait.

Legend: P rows, sorted by expert, E experts, D numbers in, M numbers out.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.kernels.experts_kernel import multiply_tiles

_TORCH_MAJOR: Final = 9
_ALIGNED: Final = 8  # numbers of bfloat16 in the 16 bytes to which rows must be aligned


def product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """See experts_reference.py."""
    if _has_torch_product(rows_PD, weight_EMD):
        return functional.grouped_mm(rows_PD, weight_EMD.transpose(1, 2), offs=end_E)
    return triton_product(rows_PD, weight_EMD, end_E)


def _has_torch_product(rows_PD: Tensor, weight_EMD: Tensor) -> bool:
    if rows_PD.dtype != torch.bfloat16 or not rows_PD.is_cuda or not hasattr(functional, "grouped_mm"):
        return False
    aligned = weight_EMD.shape[1] % _ALIGNED == 0 and weight_EMD.shape[2] % _ALIGNED == 0
    return aligned and torch.cuda.get_device_capability(rows_PD.device)[0] == _TORCH_MAJOR


def triton_product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """The product in Triton, for any dtype of float32 or less."""
    num_rows, width_in = rows_PD.shape
    num_experts, width_out, _ = weight_EMD.shape
    out_PM = torch.empty(num_rows, width_out, dtype=rows_PD.dtype, device=rows_PD.device)
    if not num_rows:
        return out_PM
    assert rows_PD.stride(1) == 1 and weight_EMD.stride(2) == 1, "the numbers of a row follow each other"
    wide = rows_PD.dtype == torch.float32
    block_p = max(16, min(64, _power(num_rows // num_experts)))
    block_m, block_d = (32, 32) if wide else (64, 64)
    most_tiles = num_rows // block_p + min(num_rows, num_experts)
    multiply_tiles[(most_tiles, -(-width_out // block_m))](
        rows_PD,
        weight_EMD,
        end_E,
        out_PM,
        num_experts,
        width_out,
        width_in,
        rows_PD.stride(0),
        weight_EMD.stride(0),
        weight_EMD.stride(1),
        EXPERTS=_power(num_experts),
        BLOCK_P=block_p,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        WIDE=wide,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out_PM


def _power(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, number - 1).bit_length()
