"""Products whose rows have the same bits in any batch on a GPU, in Triton.

torch's products choose their kernel, and into how many parts a sum is split, by the number of rows. Here every product of a model
runs by one compiled kernel with tiles of one size, which its dtype and its width choose alone. A tile adds up its whole width,
block after block, in float32. So the numbers of a row and of a column are added in one order, whatever the other rows are, how
many there are, and where in a tile the row stands.

The price: a single row costs as much as a tile of them, few columns keep only a part of the device busy, and many rows run by
smaller tiles than torch would take for them.

Legend: N rows, H heads that have weights of their own, K numbers in, M numbers out.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.decoders.kernels.seen import power_of_two

_HALF: Final = (64, 64, 128)
_WIDE: Final = (32, 64, 32)
"""Rows, columns and width of a tile in half precision and in float32. Three stages of both inputs take 96 KiB at most, which a
program has on every GPU since Ampere. Tensor cores multiply 64 rows at once; float32 runs without them: fewer waste less."""
_STAGES: Final = 3
_GROUP: Final = 8  # tiles of rows that run beside each other, for which the weights are read from the cache
_ALIGNED: Final = 16


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    rows, weights, biases, out, num_rows, WIDTH_OUT, WIDTH_IN, rows_n, rows_h, weights_h, weights_m, weights_k, out_n,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One tile of rows times one block of columns of one head."""
    head = tl.program_id(1).to(tl.int64)
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_N), tl.cdiv(WIDTH_OUT, BLOCK_M)
    number = tl.program_id(0)
    first_tile = number // (GROUP * column_tiles) * GROUP
    together = tl.minimum(row_tiles - first_tile, GROUP)
    number = number % (GROUP * column_tiles)
    row = (first_tile + number % together) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = number // together * BLOCK_M + tl.arange(0, BLOCK_M)
    live, there = row < num_rows, column < WIDTH_OUT
    row_64, column_64 = row.to(tl.int64), column.to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    left_at = rows + head * rows_h + row_64[:, None] * rows_n + place[None, :]
    right_at = weights + head * weights_h + column_64[None, :] * weights_m + place[:, None].to(tl.int64) * weights_k
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, WIDTH_IN, BLOCK_K):
        inside = place < WIDTH_IN - first
        left = tl.load(left_at, mask=live[:, None] & inside[None, :], other=0.0)
        right = tl.load(right_at, mask=there[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        left_at += BLOCK_K
        right_at += BLOCK_K * weights_k
    if BIASED:
        bias = tl.load(biases + column, mask=there, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_at = out + row_64[:, None] * out_n + head * WIDTH_OUT + column[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


def fixed_product(rows_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, [N, M]; with heads, rows [N, H, K] and weights [H, M, K] give [N, H, M]. The number of rows is
    all that may differ between two launches for the same weights: all else that Triton compiles for, alignments too, is made
    the same."""
    num_rows, width_in = rows_NK.shape[0], rows_NK.shape[-1]
    num_heads = rows_NK.shape[1] if rows_NK.dim() == 3 else 1
    width_out = weight_MK.shape[-2]
    out_NM = torch.empty(*rows_NK.shape[:-1], width_out, dtype=rows_NK.dtype, device=rows_NK.device)
    if not num_rows:
        return out_NM
    rows_NK = rows_NK.contiguous()
    if rows_NK.data_ptr() % _ALIGNED:
        rows_NK = rows_NK.clone()
    block_n, block_m, most_k = _WIDE if rows_NK.dtype == torch.float32 else _HALF
    tiles = -(-num_rows // block_n) * -(-width_out // block_m)
    multiply_rows[(tiles, num_heads)](
        rows_NK, weight_MK, weight_MK if bias_M is None else bias_M, out_NM, num_rows, width_out, width_in,
        num_heads * width_in, width_in, weight_MK.stride(0) if weight_MK.dim() == 3 else 0, *weight_MK.stride()[-2:],
        num_heads * width_out, BLOCK_N=block_n, BLOCK_M=block_m, BLOCK_K=max(16, min(most_k, power_of_two(width_in))),
        GROUP=_GROUP, BIASED=bias_M is not None, num_warps=4, num_stages=_STAGES, enable_fp_fusion=True,
    )  # fmt: skip
    return out_NM
