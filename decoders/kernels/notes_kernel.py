"""The code of notes.py for the device: one program a row, as in choice_kernel.py, and what decoders want to know of the row.

1  the largest number; then, in float64, the model's own sum of exponentials and the sums that its notes are made of
2  the token, as choice_kernel.py draws it
3  warped notes only: the same sums over the distribution that the token was drawn from, in float32, cut to its nucleus
"""

import triton
import triton.language as tl

from draftmill.decoders.kernels.laws_kernel import (
    cut_of,
    largest_of,
    law_of,
    nucleus_of,
    numbers_at,
    sampled_token,
    seed_of,
    totals_of,
)


@triton.jit
def _model_sums(logits, suppressed, largest, place, V, MOMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of e = exp(number - largest): the sums of e, of e log e and of e^2, and the largest e but the first; float64."""
    total, slope = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    squares, second = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        below = number.to(tl.float64) - largest.to(tl.float64)
        mass = tl.exp(below)
        total += tl.sum(mass, 0)
        if MOMENTS:
            slope += tl.sum(tl.where(mass > 0, mass * below, 0.0), 0)
            squares += tl.sum(mass * mass, 0)
            second = tl.maximum(second, tl.max(tl.where(token == place, 0.0, mass), 0))
    return total, slope, squares, second


@triton.jit
def _law_sums(
    logits, suppressed, temperature, least, most, log_total, bound, count, place, V, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the masses p above `bound`, and `count` times `bound` itself: the sums of p log p and of p^2, and the second largest."""
    slope, squares = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    second, best = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        law = law_of(number, temperature, least, most, log_total)
        mass = tl.exp(law)
        mass = tl.where(mass > bound, mass, 0.0)
        slope += tl.sum(tl.where(mass > 0, mass * law, 0.0).to(tl.float64), 0)
        squares += tl.sum((mass * mass).to(tl.float64), 0)
        second = tl.maximum(second, tl.max(tl.where(token == place, 0.0, mass), 0).to(tl.float64))
        best = tl.maximum(best, tl.max(tl.where(token == place, mass, 0.0), 0).to(tl.float64))
    each = bound.to(tl.float64)
    times = count.to(tl.float64)
    slope += tl.where(each > 0, times * each * tl.log(each), 0.0)
    squares += times * each * each
    # Where the largest mass is one of the `count`, the second is one only if there are two.
    others = tl.where(best > 0, count, count - 1)
    second = tl.where(others > 0, tl.maximum(second, each), second)
    return slope, squares, second, tl.where(best > 0, best, each)


@triton.jit
def _log_scores(logits, mask, V, BLOCK: tl.constexpr):
    """The logarithm of the sum of exponentials of all numbers but that of the mask, also of suppressed ids; float64."""
    most = tl.full([], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        number = tl.load(logits + token, mask=(token < V) & (token != mask), other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, tl.max(number, 0))
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        number = tl.load(logits + token, mask=(token < V) & (token != mask), other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(number.to(tl.float64) - most.to(tl.float64)), 0)
    return most.to(tl.float64) + tl.log(total)


@triton.jit
def _uniform(seed, position, draw, PURPOSE: tl.constexpr):
    """A number in (0, 1) of a position (token 0 of the field)."""
    zero = position * 0
    word, _, _, _ = tl.philox(seed, zero, position, zero + PURPOSE, draw)
    return (word.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def note_rows(
    logits,
    suppressed,
    temperatures,
    top_ps,
    keys,
    positions,
    steps,
    draws,
    out,
    logits_r,
    out_f,
    V,
    K,
    mask,
    PURPOSE: tl.constexpr,
    ORDER_PURPOSE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    WARPED: tl.constexpr,
    STEPS: tl.constexpr,
    AT_TOP1: tl.constexpr,
    AT_MARGIN: tl.constexpr,
    AT_ENTROPY: tl.constexpr,
    AT_SQUARES: tl.constexpr,
    AT_ORDER: tl.constexpr,
    AT_SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See the module's docstring. AT_ says in which row of `out` a note goes; 0, which is the token's, that it is not wanted."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_r
    out += row
    moments: tl.constexpr = AT_MARGIN + AT_ENTROPY + AT_SQUARES > 0
    given = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(given > 0, given, 1.0)
    seed, position = seed_of(keys, row), tl.load(positions + row).to(tl.uint32)
    step = position * 0
    if STEPS:
        step = tl.load(steps + row).to(tl.uint32)
    largest, place = largest_of(logits, suppressed, V, BLOCK)
    chosen = place
    total, slope, squares, second = _model_sums(logits, suppressed, largest, place, V, moments, BLOCK)
    log_sum = tl.log(total)
    entropy, squares = log_sum - slope / total, squares / (total * total)
    margin = (1.0 - second) / total
    top1 = 1.0 / total
    if given > 0:
        most = largest / temperature
        _, log_total = totals_of(logits, suppressed, temperature, largest, V, BLOCK)
        least, log_total = cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        chosen = sampled_token(
            logits, suppressed, temperature, least, most, log_total, top_ps + row, seed, position, step, V,
            PURPOSE, TOP_P, BLOCK,
        )  # fmt: skip
        if WARPED:
            number = tl.load(logits + chosen).to(tl.float32)
            law = law_of(number, temperature, least, most, log_total)
            bound, count = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32)
            whole = tl.full([], 1.0, tl.float64)
            if TOP_P:
                top_p = tl.load(top_ps + row)
                if top_p < 1.0:
                    bound, count, whole = nucleus_of(
                        logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK
                    )
            top1 = tl.exp(law.to(tl.float64)) / whole
            if moments:
                slope, squares, second, best = _law_sums(
                    logits, suppressed, temperature, least, most, log_total, bound, count, place, V, BLOCK
                )
                entropy, squares = tl.log(whole) - slope / whole, squares / (whole * whole)
                margin = (best - second) / whole
    number = tl.load(logits + chosen).to(tl.float64)
    log_p = number - largest.to(tl.float64) - log_sum
    if not WARPED:
        top1 = tl.exp(log_p)
    tl.store(out, chosen.to(tl.float64))
    tl.store(out + out_f, log_p)
    if AT_TOP1:
        tl.store(out + AT_TOP1 * out_f, top1)
    if AT_MARGIN:
        tl.store(out + AT_MARGIN * out_f, margin)
    if AT_ENTROPY:
        tl.store(out + AT_ENTROPY * out_f, entropy)
    if AT_SQUARES:
        tl.store(out + AT_SQUARES * out_f, squares)
    if AT_ORDER:
        draw = tl.load(draws + row).to(tl.uint32)
        tl.store(out + AT_ORDER * out_f, _uniform(seed, position, draw, ORDER_PURPOSE))
    if AT_SCORES:
        tl.store(out + AT_SCORES * out_f, _log_scores(logits, mask, V, BLOCK))
