"""Products of rows with the weights of their experts on a GPU: torch's grouped product, or Triton.

torch's product is taken where its fast form is known to exist (bfloat16 on Hopper); its other forms read the ends
back to the host, which would wait.

In Triton each expert's rows are cut into tiles of their own. How many tiles an expert has is known on the device alone: there are
as many programs as there could be tiles, each looks up which tile it is, and those that are left over end at once.

    ends     3 3 8                 three experts with 3, 0 and 5 rows, four rows a tile
    tiles    1 0 2                 program 0: expert 0; programs 1 and 2: expert 2; the others end

Legend: P rows, sorted by expert, E experts, D numbers in, M numbers out.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.kernels.seen import power_of_two

_TORCH_MAJOR: Final = 9
_FIXED: Final = 32
_ALIGNED: Final = 8  # numbers of bfloat16 in the 16 bytes to which rows must be aligned


@triton.jit
def multiply_tiles(
    rows, weights, ends, out, num_experts, WIDTH_OUT, WIDTH_IN, rows_p, weights_e, weights_m,
    EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of rows times one block of columns; EXPERTS is a power of two, at least the number of experts."""
    precision: tl.constexpr = "ieee" if WIDE else "tf32"
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    end = tl.load(ends + expert, mask=real, other=0)
    start = tl.load(ends + expert - 1, mask=real & (expert > 0), other=0)
    tiles = tl.where(real, tl.cdiv(end - start, BLOCK_P), 0)
    till = tl.cumsum(tiles, 0)
    mine = tl.sum((real & (till <= tile)).to(tl.int32), 0)
    if mine < num_experts:
        own = expert == mine
        number = tile - tl.sum(tl.where(own, till - tiles, 0), 0)
        row = tl.sum(tl.where(own, start, 0), 0) + number * BLOCK_P + tl.arange(0, BLOCK_P)
        live = row < tl.sum(tl.where(own, end, 0), 0)
        column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = column < WIDTH_OUT
        row_64 = row.to(tl.int64)
        weights += mine.to(tl.int64) * weights_e
        total = tl.zeros([BLOCK_P, BLOCK_M], tl.float32)
        for first in range(0, WIDTH_IN, BLOCK_D):
            place = first + tl.arange(0, BLOCK_D)
            inside = place < WIDTH_IN
            left_at = rows + row_64[:, None] * rows_p + place[None, :]
            left = tl.load(left_at, mask=live[:, None] & inside[None, :], other=0.0)
            right_at = weights + column[None, :] * weights_m + place[:, None]
            right = tl.load(right_at, mask=there[None, :] & inside[:, None], other=0.0)
            total += tl.dot(left, right, input_precision=precision)
        out_at = out + row_64[:, None] * WIDTH_OUT + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


def product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert, [P, M]; sums are in float32. Expert e has the rows from the end of the
    expert before it up to `end_E[e]` (int32); the last end is P."""
    if _has_torch_product(rows_PD, weight_EMD):
        return functional.grouped_mm(rows_PD, weight_EMD.transpose(1, 2), offs=end_E)
    return triton_product(rows_PD, weight_EMD, end_E)


def _has_torch_product(rows_PD: Tensor, weight_EMD: Tensor) -> bool:
    if rows_PD.dtype != torch.bfloat16 or not rows_PD.is_cuda or not hasattr(functional, "grouped_mm"):
        return False
    aligned = weight_EMD.shape[1] % _ALIGNED == 0 and weight_EMD.shape[2] % _ALIGNED == 0
    return aligned and torch.cuda.get_device_capability(rows_PD.device)[0] == _TORCH_MAJOR


def fixed_product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """The product in Triton by tiles of one size, so that a row has the same bits in any batch."""
    return triton_product(rows_PD, weight_EMD, end_E, block_p=_FIXED)


def triton_product(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor, *, block_p: int | None = None) -> Tensor:
    """The product in Triton, for any dtype of float32 or less. A tile has `block_p` rows; None: all of an expert's."""
    num_rows, width_in = rows_PD.shape
    num_experts, width_out, _ = weight_EMD.shape
    out_PM = torch.empty(num_rows, width_out, dtype=rows_PD.dtype, device=rows_PD.device)
    if not num_rows:
        return out_PM
    assert rows_PD.stride(1) == 1 and weight_EMD.stride(2) == 1, "the numbers of a row follow each other"
    wide = rows_PD.dtype == torch.float32
    block_p = block_p or max(16, min(64, power_of_two(num_rows // num_experts)))
    block_m, block_d = (32, 32) if wide else (64, 64)
    most_tiles = num_rows // block_p + min(num_rows, num_experts)
    multiply_tiles[(most_tiles, -(-width_out // block_m))](
        rows_PD, weight_EMD, end_E, out_PM, num_experts, width_out, width_in,
        rows_PD.stride(0), weight_EMD.stride(0), weight_EMD.stride(1),
        EXPERTS=power_of_two(num_experts), BLOCK_P=block_p, BLOCK_M=block_m, BLOCK_D=block_d, WIDE=wide,
        num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return out_PM
