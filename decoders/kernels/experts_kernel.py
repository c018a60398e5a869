"""The code of experts.py for the device: a product whose rows have different matrices.

Each expert's rows are cut into tiles of their own. How many tiles an expert has is known on the device alone: there are as many
programs as there could be tiles, each looks up which tile it is, and those that are left over end at once.

    ends     3 3 8                 three experts with 3, 0 and 5 rows, four rows a tile
    tiles    1 0 2                 program 0: expert 0; programs 1 and 2: expert 2; the others end
"""

import triton
import triton.language as tl


@triton.jit
def multiply_tiles(
    rows,
    weights,
    ends,
    out,
    num_experts,
    WIDTH_OUT,
    WIDTH_IN,
    rows_p,
    weights_e,
    weights_m,
    EXPERTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
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
