"""Attention of flat rows over one layer of the slot cache, in Triton.

One program serves a tile of rows, the G query heads of one key head, and one share of the columns. It walks through the intervals
one after the other, from the first column that a row of the tile sees to the last one. A column that a row sees in an earlier
interval is skipped, so that it counts once. No mask, no copy of the cache, no column beyond what the tile sees.

Scores are kept in base 2 (exp2 is what the device has). Sums are in float32 as the columns come: Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022); the shares are added as in Dao et al.,
"Flash-Decoding for long-context inference" (2023).

Few rows over long slots would keep only a part of the device busy: then the columns are shared out among several programs and
their sums added by a second kernel. How many shares there are depends on shapes alone, never on what the rows see.

Few variants are compiled: a tile has one of three sizes (seen.py), each with and without shares. A row's numbers do not depend on
the other rows of its tile: blocks begin at multiples of their size, and columns that a row does not see add nothing to its sums.

Legend: N flat rows, H heads, K key heads, G = H / K, S slots, W columns, P distances.
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.decoders.kernels.seen import Seen, line_bytes, power_of_two, tile_bytes

# Tensor cores multiply 16 numbers at a time.
_LEAST_WIDTH: Final = 16
# Two stages of keys and values take two thirds of a program's shared memory, the queries of a tile the other third (seen.py).
_STAGES: Final = 2
_MOST_BLOCK: Final = 64
_MOST_WIDE_BLOCK: Final = 16
# Programs that keep a large GPU busy (an H100 has 132 multiprocessors), and columns below which a share is not worth its sum.
_BUSY: Final = 256
_LEAST_SHARE: Final = 512
_MOST_SHARES: Final = 16

_FAR = tl.constexpr(0x7FFFFFFF)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _within(low, high, column):
    """Whether the interval of each line holds each column."""
    return (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])


@triton.jit
def _join(
    query, key, value, score_bias, seen, most, total, mixed, scale, cap, CAPPED: tl.constexpr, WIDE: tl.constexpr
):
    """Add a block of columns to the running softmax of each line. With CAPPED, `scale` is that of 2 x score / cap, in base 2, as
    is `cap`: tanh(x) = 1 - 2 / (1 + exp(2 x))."""
    precision: tl.constexpr = "ieee" if WIDE else "tf32"
    score = tl.dot(query, tl.trans(key), input_precision=precision) * scale
    if CAPPED:
        score = cap * (1.0 - 2.0 / (1.0 + tl.exp2(score)))
    score = score + score_bias
    score = tl.where(seen, score, float("-inf"))
    now = tl.maximum(most, tl.max(score, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=precision)
    return now, total, mixed


# Rows may begin anywhere (Seen.after), and there may be any number of distances: neither is worth a variant.
@triton.jit(
    do_not_specialize=[
        "num_rows", "skip", "shares", "window", "num_distances", "lows_i", "positions_s", "relative_n", "relative_h"
    ],
    do_not_specialize_on_alignment=["slots", "lows", "highs", "row_positions"],
)  # fmt: skip
def attend_tiles(
    query, keys, values, out, out_most, out_total, tiles, slots, lows, highs, row_positions, positions, relative, sinks,
    scale, cap, num_rows, skip, shares, window, num_distances,
    query_n, query_h, cache_s, cache_k, cache_w, lows_i, positions_s, relative_n, relative_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    INTERVALS: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr, RELATIVE: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See the module's docstring. A tile has LINES lines, a line PADDED >= WIDTH numbers, all powers of two. With one share `out`
    is the answer, [N, H, d]; with several it holds each share's unfinished sum, float32 [shares, N, H, d], and `out_most` and
    `out_total` [shares, N, H] its largest score and the sum of its weights."""
    ROWS: tl.constexpr = LINES // GROUP
    first = tl.load(tiles + tl.program_id(0)).to(tl.int32) - skip
    if (first >= 0) & (first < num_rows):
        key_head, share = tl.program_id(1), tl.program_id(2)
        slot = tl.load(slots + first).to(tl.int64)
        line = tl.arange(0, LINES)
        row, head = first + line // GROUP, key_head * GROUP + line % GROUP
        live = (line < ROWS * GROUP) & (row < num_rows)
        live = live & (tl.load(slots + row, mask=live, other=-1).to(tl.int64) == slot)
        place = tl.arange(0, PADDED)
        inside = place < WIDTH
        row_64 = row.to(tl.int64)
        query_at = query + row_64[:, None] * query_n + head[:, None] * query_h + place[None, :]
        asked = tl.load(query_at, mask=live[:, None] & inside[None, :], other=0.0)
        start = slot * cache_s + key_head * cache_k
        row_position = tl.zeros([LINES], tl.int32)
        if WINDOW or RELATIVE:
            row_position = tl.load(row_positions + row, mask=live, other=0).to(tl.int32)
        most = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        if SINKS and share == 0:
            # The sums of the first share begin with the sink, which holds nothing.
            most = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * _LOG2_E
            total += 1.0
        mixed = tl.zeros([LINES, PADDED], tl.float32)
        for interval in tl.static_range(INTERVALS):
            low = tl.load(lows + interval * lows_i + row, mask=live, other=0).to(tl.int32)
            high = tl.load(highs + interval * lows_i + row, mask=live, other=0).to(tl.int32)
            begin = tl.min(tl.where(low < high, low, _FAR), 0) // BLOCK * BLOCK
            end = tl.max(tl.where(low < high, high, 0), 0)
            each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), shares) * BLOCK
            begin = begin + share * each
            end = tl.minimum(end, begin + each)
            for from_column in range(begin, end, BLOCK):
                column = from_column + tl.arange(0, BLOCK)
                there = column < end
                seen = live[:, None] & there[None, :] & _within(low, high, column)
                for earlier in tl.static_range(interval):
                    low_before = tl.load(lows + earlier * lows_i + row, mask=live, other=0).to(tl.int32)
                    high_before = tl.load(highs + earlier * lows_i + row, mask=live, other=0).to(tl.int32)
                    seen = seen & ~_within(low_before, high_before, column)
                bias = tl.zeros([LINES, BLOCK], tl.float32)
                if WINDOW or RELATIVE:
                    near = tl.load(positions + slot * positions_s + column, mask=there, other=0).to(tl.int32)
                    if WINDOW:
                        seen = seen & (near[None, :] > row_position[:, None] - window)
                    if RELATIVE:
                        distance = row_position[:, None] - near[None, :] + num_distances // 2
                        distance = tl.minimum(tl.maximum(distance, 0), num_distances - 1)
                        relative_at = relative + row_64[:, None] * relative_n + head[:, None] * relative_h + distance
                        bias = tl.load(relative_at, mask=seen, other=0.0).to(tl.float32) * _LOG2_E
                cell = start + column[:, None].to(tl.int64) * cache_w + place[None, :]
                held = there[:, None] & inside[None, :]
                is_near = True
                if WINDOW:  # far behind the window there is nothing to read
                    is_near = tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0
                if is_near:
                    key = tl.load(keys + cell, mask=held, other=0.0)
                    value = tl.load(values + cell, mask=held, other=0.0)
                    most, total, mixed = _join(
                        asked, key, value, bias, seen, most, total, mixed, scale, cap, CAPPED, WIDE
                    )
        answer = row_64 * HEADS + head
        if not SHARED:
            mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        else:
            answer = answer + share.to(tl.int64) * num_rows * HEADS
            tl.store(out_most + answer, most, mask=live)
            tl.store(out_total + answer, total, mask=live)
        out_at = out + answer[:, None] * WIDTH + place[None, :]
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_answers", "num_shares"])
def add_shares(
    shares, shares_most, shares_total, out, num_answers, num_shares,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Add the shares of one head of one row, at most MOST; `num_answers` is N x H. A share whose total is 0 is not read: nobody
    wrote it, or its columns are hidden."""
    answer = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, MOST)
    total = tl.load(shares_total + share * num_answers + answer, mask=share < num_shares, other=0.0)
    written = total != 0
    place = tl.arange(0, PADDED)
    inside = place < WIDTH
    most = tl.load(shares_most + share * num_answers + answer, mask=written, other=float("-inf"))
    largest = tl.max(most, 0)
    factor = tl.exp2(most - tl.where(largest == float("-inf"), 0.0, largest))
    mixed_at = shares + (share[:, None] * num_answers + answer) * WIDTH + place[None, :]
    mixed = tl.sum(tl.load(mixed_at, mask=written[:, None] & inside[None, :], other=0.0) * factor[:, None], 0)
    whole = tl.sum(total * factor, 0)
    mixed = mixed / tl.where(whole > 0, whole, 1.0)
    tl.store(out + answer * WIDTH + place, mixed.to(out.dtype.element_ty), mask=inside)


def attend(
    query_NHd: Tensor,
    layer_2SKWd: Tensor,
    seen: Seen,
    *,
    scaling: float,
    window: int | None = None,
    relative_NHP: Tensor | None = None,
    cap: float | None = None,
    sink_H: Tensor | None = None,
    shares: int | None = None,
) -> Tensor:
    """Mix the values of the columns that each row sees by the softmax of its scores, [N, H, d]; sums are in float32.

    A score is scaling x (query . key); with `cap`, cap x tanh(that / cap). With `relative_NHP` the row's number for the distance
    of the two positions is added, as it is: position of the row - position of the column + P / 2, cut to 0 .. P - 1. A head's
    sink is one more score, of a place that every row sees and that holds nothing. A row that sees nothing gets zeros; rows beyond
    the tiles of `seen` get anything. The columns are cut into this number of `shares`; None: as many as are worth it.
    """
    assert query_NHd.dtype == layer_2SKWd.dtype != torch.float64, "float64 is computed by torch (find.py)"
    assert seen.tables is not None, "the host cuts rows into tiles"
    query_NHd = query_NHd if query_NHd.stride(2) == 1 else query_NHd.contiguous()
    num_rows, num_heads, width = query_NHd.shape
    key_heads, num_columns = layer_2SKWd.shape[2], seen.num_columns or layer_2SKWd.shape[3]
    slot_s, head_s, cell_s = layer_2SKWd.stride()[1:4]
    group, padded = num_heads // key_heads, max(_LEAST_WIDTH, power_of_two(width))
    # Each kind of tile has as many shares as it is worth; where any has several, all rows are added up at the end, once.
    shares_T = [shares or _shares(first_T.shape[0] * key_heads, num_columns) for first_T in seen.tables.first_T]
    most_shares = max(shares_T, default=1)
    out_NHd = sums = largest = totals = torch.empty(query_NHd.shape, dtype=query_NHd.dtype, device=query_NHd.device)
    if most_shares > 1:
        sums = out_NHd.new_empty(most_shares, num_rows, num_heads, width, dtype=torch.float32)
        largest = out_NHd.new_empty(most_shares, num_rows, num_heads, dtype=torch.float32)
        totals = torch.zeros_like(largest)
    # A kernel that reads no positions, distances or sinks takes any tensor in their place.
    relative = query_NHd if relative_NHP is None else relative_NHP
    sinks = query_NHd if sink_H is None else sink_H
    scale, cap_2 = scaling * math.log2(math.e), (cap or 0.0) * math.log2(math.e)
    assert relative_NHP is None or relative_NHP.stride(2) == 1, "the numbers of a row's distances follow each other"
    row_positions = positions = slots = seen.slot_N if seen.start_N is None else seen.start_N
    if window is not None or relative_NHP is not None:
        assert seen.positions_SW is not None and seen.position_N is not None, (
            "windows and relative scores read positions"
        )
        row_positions, positions = seen.position_N, seen.positions_SW
    from_cells = seen.start_N is not None
    for lines, first_T, num_shares in zip(*seen.tables, shares_T, strict=True):
        attend_tiles[(first_T.shape[0], key_heads, num_shares)](
            query_NHd, layer_2SKWd[0], layer_2SKWd[1], sums, largest, totals, first_T, slots, seen.low_IN, seen.high_IN,
            row_positions, positions, relative, sinks,
            scale if cap is None else 2 * scale / cap, cap_2, num_rows, seen.skip, num_shares, window or 0,
            relative.shape[-1], query_NHd.stride(0), query_NHd.stride(1), cell_s if from_cells else slot_s, head_s, cell_s,
            seen.low_IN.stride(0), 1 if from_cells else positions.stride(0), relative.stride(0), relative.stride(1),
            HEADS=num_heads, GROUP=group, LINES=lines, WIDTH=width, PADDED=padded, INTERVALS=seen.low_IN.shape[0],
            BLOCK=_block(width, query_NHd), SHARED=most_shares > 1, WINDOW=window is not None,
            RELATIVE=relative_NHP is not None, CAPPED=cap is not None, SINKS=sink_H is not None,
            WIDE=query_NHd.dtype == torch.float32,
            num_warps=8 if lines * padded > 1 << 13 else 4, num_stages=_STAGES, enable_fp_fusion=True,
        )  # fmt: skip
    if most_shares > 1:
        sizes = {"WIDTH": width, "PADDED": padded, "MOST": _MOST_SHARES}
        num_answers = num_rows * num_heads
        add_shares[(num_answers,)](sums, largest, totals, out_NHd, num_answers, most_shares, **sizes)
    return out_NHd


def _block(width: int, query_NHd: Tensor) -> int:
    """Columns that a program reads at once, a power of two."""
    held = 2 * tile_bytes(query_NHd.device) // (2 * _STAGES * line_bytes(width, query_NHd.dtype))
    return max(16, min(_MOST_WIDE_BLOCK if query_NHd.dtype == torch.float32 else _MOST_BLOCK, held))


def _shares(num_programs: int, num_columns: int) -> int:
    """Into how many parts the columns are cut: enough to keep the device busy, none of them short."""
    return max(1, min(_BUSY // max(1, num_programs), num_columns // _LEAST_SHARE, _MOST_SHARES))
