"""What stands between the products of a rotary model's layer, in Triton.

    add_norm   the sum of a residual and what a layer adds to it, and that sum normed
    rotate     the norms of heads, where a model has them, the turning of queries and keys, and the writing of keys and values
    gated      silu(gate) * up

With the four products and attention a layer is nine launches. Everything is computed in float32 and rounded once: transformers'
modules round after each operation, so that numbers differ by rounding alone.

Legend: P rows, D width, H heads, K key heads, J = H + 2 K, C cells of the cache, I inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.decoders.kernels.seen import power_of_two

_MOST_GATED = 1024


@triton.jit
def add_norm_rows(states, added, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """One row: states += added, and out = the norm of that."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < WIDTH
    at = row * WIDTH + place
    state = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        state += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        rounded = state.to(states.dtype.element_ty)
        tl.store(states + at, rounded, mask=inside)
        state = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(state * state, 0) / WIDTH + eps)
    normed = state * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["values_at"])
def rotate_heads(
    heads, positions, cells, pool, frequencies, query_weight, key_weight, values_at, factor, eps,
    NUM_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query is turned where it is, a key and a value go to their cell; values begin at `values_at`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    inside = place < HALF
    at = heads + (row * (NUM_HEADS + 2 * KEY_HEADS) + head) * 2 * HALF + place
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + KEY_HEADS
    if not is_value:
        if NORMED:
            scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
            weight = query_weight
            if not is_query:
                weight = key_weight
            low = low * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
            high = high * scale * tl.load(weight + HALF + place, mask=inside, other=0.0).to(tl.float32)
        angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + place, mask=inside, other=0.0)
        cosine, sine = tl.cos(angle) * factor, tl.sin(angle) * factor
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    if is_query:
        target = at
    else:
        cell = tl.load(cells + row) * KEY_HEADS + (head - NUM_HEADS) % KEY_HEADS
        target = pool + cell * 2 * HALF + place
        if is_value:
            target += values_at
    tl.store(target, low.to(heads.dtype.element_ty), mask=inside)
    tl.store(target + HALF, high.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A block of one row: silu of its first half times its second half."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + place, gated.to(out.dtype.element_ty), mask=inside)


def add_norm(states_PD: Tensor, added_PD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add to the states, in place, and return the sums divided by their root mean square and weighed, [P, D]."""
    out_PD = torch.empty_like(states_PD)
    num_rows, width = states_PD.shape
    if num_rows:
        padded = power_of_two(width)
        add_norm_rows[(num_rows,)](
            states_PD, states_PD if added_PD is None else added_PD, weight_D, out_PD, eps, WIDTH=width, PADDED=padded,
            ADDS=added_PD is not None, num_warps=max(1, min(8, padded // 512)),
        )  # fmt: skip
    return out_PD


def rotate(
    heads_PJd: Tensor,
    position_P: Tensor,
    cell_P: Tensor,
    pool_2CKd: Tensor,
    turn: tuple[Tensor, float],
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    """Turn each row's queries, in place, and its keys by its position (`turn`: radians a position, float32 [d / 2], and a factor
    of cosines and sines), and write keys and values, which follow the queries, into cell `cell_P` of the cache. `norms`: first
    norm queries and keys, by the weights of each and an epsilon."""
    num_rows, num_all, width = heads_PJd.shape
    key_heads, (frequency_h, factor) = pool_2CKd.shape[2], turn
    query_weight, key_weight, eps = norms or (frequency_h, frequency_h, 0.0)
    if num_rows:
        rotate_heads[(num_rows, num_all)](
            heads_PJd, position_P, cell_P, pool_2CKd, frequency_h, query_weight, key_weight, pool_2CKd[0].numel(), factor, eps,
            NUM_HEADS=num_all - 2 * key_heads, KEY_HEADS=key_heads, HALF=width // 2, PADDED=power_of_two(width // 2),
            NORMED=norms is not None, num_warps=1,
        )  # fmt: skip


def gated(both_PI: Tensor) -> Tensor:
    """silu of the first half of each row times the second half, [P, I / 2]."""
    num_rows, width = both_PI.shape[0], both_PI.shape[1] // 2
    out_PI = both_PI.new_empty(num_rows, width)
    if num_rows:
        block = min(_MOST_GATED, power_of_two(width))
        gate_rows[(num_rows, -(-width // block))](both_PI, out_PI, WIDTH=width, BLOCK=block, num_warps=4)
    return out_PI
