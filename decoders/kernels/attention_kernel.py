"""The code of attention.py for the device: attention by intervals over the slot cache, and the sum of its parts.

One program serves a tile of rows, the G query heads of one key head, and one share of the columns. It walks through the intervals
one after the other, from the first column that a row of the tile sees to the last one. A column that an earlier interval has
shown to a row already is left out, so that it counts once. No mask, no copy of the cache, no column beyond what the tile sees.

Scores are kept in base 2 (exp2 is what the device has). Sums are in float32 as the columns come: Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022); the shares are added as in Dao et al.,
"Flash-Decoding for long-context inference" (2023).
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _within(lows, highs, interval, row, live, num_rows, column):
    """Whether the interval of each line holds each column."""
    low = tl.load(lows + interval * num_rows + row, mask=live, other=0)
    high = tl.load(highs + interval * num_rows + row, mask=live, other=0)
    return (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])


@triton.jit
def _join(query, key, value, score_bias, seen, most, total, mixed, scale, WIDE: tl.constexpr):
    """Add a block of columns to the running softmax of each line."""
    precision: tl.constexpr = "ieee" if WIDE else "tf32"
    score = tl.dot(query, tl.trans(key), input_precision=precision) * scale + score_bias
    score = tl.where(seen, score, float("-inf"))
    now = tl.maximum(most, tl.max(score, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weight, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=precision)
    return now, total, mixed


@triton.jit
def attend_tiles(
    query,
    keys,
    values,
    out,
    out_most,
    out_total,
    tiles,
    slots,
    lows,
    highs,
    row_positions,
    positions,
    relative,
    scale,
    num_rows,
    num_columns,
    window,
    num_distances,
    query_n,
    query_h,
    cache_s,
    cache_k,
    cache_w,
    positions_s,
    relative_n,
    relative_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    INTERVALS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WINDOW: tl.constexpr,
    RELATIVE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """See the module's docstring. A tile has LINES >= ROWS x GROUP lines, a line has PADDED >= WIDTH numbers, all powers of two.

    With one share `out` is the answer, [N, H, d]; with several it holds each share's unfinished sum, float32 [SHARES, N, H, d],
    and `out_most` and `out_total` [SHARES, N, H] its largest score and the sum of its weights.
    """
    first = tl.load(tiles + tl.program_id(0))
    if first < num_rows:
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
        mixed = tl.zeros([LINES, PADDED], tl.float32)
        for interval in tl.static_range(INTERVALS):
            low = tl.load(lows + interval * num_rows + row, mask=live, other=0)
            high = tl.load(highs + interval * num_rows + row, mask=live, other=0)
            begin = tl.min(tl.where(low < high, low, num_columns), 0) // BLOCK * BLOCK
            end = tl.minimum(tl.max(tl.where(low < high, high, 0), 0), num_columns)
            each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), SHARES) * BLOCK
            begin = begin + share * each
            end = tl.minimum(end, begin + each)
            for from_column in range(begin, end, BLOCK):
                column = from_column + tl.arange(0, BLOCK)
                there = column < end
                seen = live[:, None] & there[None, :] & _within(lows, highs, interval, row, live, num_rows, column)
                for earlier in tl.static_range(interval):
                    seen = seen & ~_within(lows, highs, earlier, row, live, num_rows, column)
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
                if WINDOW:
                    # Far behind the window there is nothing to read.
                    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                        key = tl.load(keys + cell, mask=held, other=0.0)
                        value = tl.load(values + cell, mask=held, other=0.0)
                        most, total, mixed = _join(asked, key, value, bias, seen, most, total, mixed, scale, WIDE)
                else:
                    key = tl.load(keys + cell, mask=held, other=0.0)
                    value = tl.load(values + cell, mask=held, other=0.0)
                    most, total, mixed = _join(asked, key, value, bias, seen, most, total, mixed, scale, WIDE)
        answer = row_64 * HEADS + head
        if SHARES == 1:
            mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        else:
            answer = answer + share.to(tl.int64) * num_rows * HEADS
            tl.store(out_most + answer, most, mask=live)
            tl.store(out_total + answer, total, mask=live)
        out_at = out + answer[:, None] * WIDTH + place[None, :]
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def add_shares(
    shares, shares_most, shares_total, out, num_answers, WIDTH: tl.constexpr, PADDED: tl.constexpr, SHARES: tl.constexpr
):
    """Add the shares of one head of one row; `num_answers` is N x H."""
    answer = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, SHARES)
    place = tl.arange(0, PADDED)
    inside = place < WIDTH
    most = tl.load(shares_most + share * num_answers + answer)
    total = tl.load(shares_total + share * num_answers + answer)
    largest = tl.max(most, 0)
    factor = tl.exp2(most - tl.where(largest == float("-inf"), 0.0, largest))
    mixed_at = shares + (share[:, None] * num_answers + answer) * WIDTH + place[None, :]
    mixed = tl.sum(tl.load(mixed_at, mask=inside[None, :], other=0.0) * factor[:, None], 0)
    whole = tl.sum(total * factor, 0)
    mixed = mixed / tl.where(whole > 0, whole, 1.0)
    tl.store(out + answer * WIDTH + place, mixed.to(out.dtype.element_ty), mask=inside)
