"""From logits to tokens and what decoders want to know of each row, in Triton: sampling_reference.py on a GPU.

One launch in place of some hundred. The integers of the noise are the reference's. Logarithms and sums are rounded by the device,
so that a token may differ where two candidates are equal but for that. Where notes are wanted, sums over the model's own
distribution are float64, as in the reference, so that decoders sort masks alike and compare them with the same thresholds; those
over warped distributions are float64 sums of float32 probabilities.

One program a row and draw reads the logits a few times and writes some numbers:

    1  the largest number and the model's own sum of exponentials; in float64 with the sums of its notes, where any are wanted
    2  the sum at the row's temperature; of what top-k leaves, whose least number is found bit by bit
    3  the noise of every token (Philox4x32-10, Salmon et al., 2011) and the best sum of log-probability and noise
    4  top-p only: the mass before the token. Most tokens are inside of the nucleus
    5  else: the nucleus, found bit by bit; then the best token inside
    6  warped notes only: their sums over the distribution that the token was drawn from, in float32, cut to its nucleus

A row is read in blocks; the second-level cache holds it. A number's bits are found from above: 32 passes. No loop's length
depends on the data (which may be NaN). The noise never touches memory.

Legend: R rows, V vocabulary, F wanted notes, A draws.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.decoders.draws.keys import TARGET
from draftmill.decoders.kernels.sampling_reference import WANTED, Wanted, Warp
from draftmill.decoders.kernels.seen import power_of_two

_BLOCK: Final = 2048
"""The most tokens that a program reads at once."""
_NONE = tl.constexpr(2147483647)


@triton.jit
def _numbers_at(logits, suppressed, first, V, BLOCK: tl.constexpr):
    """A block of a row's logits, -inf where there is no token or a suppressed one."""
    token = first + tl.arange(0, BLOCK)
    inside = token < V
    number = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    forbidden = tl.load(suppressed + token, mask=inside, other=1)
    return token, tl.where(forbidden != 0, float("-inf"), number)


@triton.jit
def _number_at(logits, suppressed, token):
    """One of a row's logits, -inf if it is suppressed."""
    return tl.where(tl.load(suppressed + token) != 0, float("-inf"), tl.load(logits + token).to(tl.float32))


@triton.jit
def _sort_key(number):
    """An integer that grows with a float32."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(logits, suppressed, temperature, most, K, V, BLOCK: tl.constexpr):
    """The K-th largest of the numbers at this temperature: the least one with fewer than K above it."""
    low = tl.full([], -2147483648, tl.int64)
    high = _sort_key(most).to(tl.int64)
    for _ in range(32):
        middle = low + ((high - low) >> 1)
        above = tl.full([], 0, tl.int32)
        for first in range(0, V, BLOCK):
            token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
            bits = _sort_key(number / temperature).to(tl.int64)
            above += tl.sum(((bits > middle) & (token < V)).to(tl.int32), 0)
        fits = above < K
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    bits_32 = high.to(tl.int32)
    return (bits_32 ^ ((bits_32 >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _law_of(number, temperature, least, most, log_total):
    """The log-probabilities at this temperature, cut below `least`."""
    scaled = number / temperature
    return tl.where(scaled >= least, (scaled - most) - log_total, float("-inf"))


@triton.jit
def _mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK: tl.constexpr):
    """The mass of all tokens with more mass than `bound`."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        _, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law_of(number, temperature, least, most, log_total))
        total += tl.sum(tl.where(mass > bound, mass, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK: tl.constexpr):
    """The mass of the tokens that come before one with mass `own` in the order of mass, among equals of index."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law_of(number, temperature, least, most, log_total))
        before = (mass > own) | ((mass == own) & (token < chosen))
        total += tl.sum(tl.where(before, mass, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _nucleus_of(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK: tl.constexpr):
    """The least mass in the nucleus, how many of the tokens with just that mass belong to it, and the nucleus' whole mass."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0x40000000, tl.int32)  # 0 and 2, as bits
    for _ in range(31):
        middle = (low + high) >> 1
        bound = middle.to(tl.float32, bitcast=True)
        above = _mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK)
        fits = above < top_p
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    bound = high.to(tl.float32, bitcast=True)
    above = _mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law_of(number, temperature, least, most, log_total))
        equal += tl.sum(((mass == bound) & (token < V)).to(tl.int32), 0)
    each = bound.to(tl.float64)
    wanted = tl.ceil((top_p - above) / tl.where(each > 0, each, 1.0))
    count = tl.where(each > 0, tl.minimum(wanted, equal.to(tl.float64)).to(tl.int32), equal)
    return bound, count, above + count.to(tl.float64) * each


@triton.jit
def _gumbel_at(seed, position, draw, first, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The noise of a block of tokens: four neighbours share a counter."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero + draw)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # As in decoders/draws/noise.py: close to one the inner logarithm needs float64.
    uniform = (word.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log((-tl.log(uniform)).to(tl.float32))


@triton.jit
def _draw_token(
    logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, draw, V,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the largest sum of log-probability and noise, the first of several; from the nucleus, if `count` > 0."""
    best, chosen = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        law = _law_of(number, temperature, least, most, log_total)
        if count > 0:
            mass = tl.exp(law)
            same = ((mass == bound) & (token < V)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0) - same
            law = tl.where((mass > bound) | ((same > 0) & (rank < count)), law, float("-inf"))
            equal += tl.sum(same, 0)
        score = law + _gumbel_at(seed, position, draw, first, PURPOSE, BLOCK)
        top = tl.max(score, 0)
        where = tl.min(tl.where(score == top, token, _NONE), 0)
        better = top > best
        chosen = tl.where(better, where, chosen)
        best = tl.where(better, top, best)
    return chosen


@triton.jit
def _largest_of(logits, suppressed, V, BLOCK: tl.constexpr):
    """The largest number, and its first place."""
    most, where = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        top = tl.max(number, 0)
        place = tl.min(tl.where(number == top, token, _NONE), 0)
        where = tl.where(top > most, place, where)
        most = tl.maximum(most, top)
    return most, where


@triton.jit
def _totals_of(logits, suppressed, temperature, most, V, BLOCK: tl.constexpr):
    """The logarithms of the sums of exponentials at temperature 1 and at this one."""
    total, warm = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, V, BLOCK):
        _, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        total += tl.sum(tl.exp(number - most), 0)
        warm += tl.sum(tl.exp(number / temperature - most / temperature), 0)
    return tl.log(total), tl.log(warm)


@triton.jit
def _cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The least number that top-k leaves, and the logarithm of the sum of what is left."""
    least = tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        least = _kth_largest(logits, suppressed, temperature, most, K, V, BLOCK)
        total = tl.full([], 0.0, tl.float32)
        for first in range(0, V, BLOCK):
            _, number = _numbers_at(logits, suppressed, first, V, BLOCK)
            total += tl.sum(tl.exp(_law_of(number, temperature, least, most, 0.0)), 0)
        log_total = tl.log(total)
    return least, log_total


@triton.jit
def _sampled_token(
    logits, suppressed, temperature, least, most, log_total, top_p_at, seed, position, draw, V,
    PURPOSE: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that the noise of a position and draw gives. Most lie in the nucleus; it is found for the others alone."""
    chosen = _draw_token(
        logits, suppressed, temperature, least, most, log_total, 0.0, 0, seed, position, draw, V, PURPOSE, BLOCK
    )
    if TOP_P:
        top_p = tl.load(top_p_at)
        if top_p < 1.0:
            number = _number_at(logits, suppressed, chosen)
            own = tl.exp(_law_of(number, temperature, least, most, log_total))
            before = _mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK)
            if before >= top_p:
                bound, count, _ = _nucleus_of(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK)
                chosen = _draw_token(
                    logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, draw, V,
                    PURPOSE, BLOCK,
                )  # fmt: skip
    return chosen


@triton.jit
def _model_sums(logits, suppressed, largest, place, V, MOMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of e = exp(number - largest): the sums of e, of e log e and of e^2, and the largest e but the first; float64."""
    total, slope = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    squares, second = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
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
        token, number = _numbers_at(logits, suppressed, first, V, BLOCK)
        law = _law_of(number, temperature, least, most, log_total)
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


@triton.jit(do_not_specialize=["R"])
def sample_rows(
    logits, suppressed, own, keys, positions, draws, scored, out, logits_r, R, V, K, mask,
    PURPOSE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, F: tl.constexpr, WARPED: tl.constexpr,
    AT_TOP1: tl.constexpr, AT_MARGIN: tl.constexpr, AT_ENTROPY: tl.constexpr, AT_SQUARES: tl.constexpr,
    AT_SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See the module's docstring. AT_ says in which row of `out` a note goes; 0, which is the token's, that it is not wanted.
    `own` are temperatures, then top-p. `draws` and `scored` may be None."""
    row, step = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * logits_r
    out += step * (2 + F) * R + row
    moments: tl.constexpr = AT_MARGIN + AT_ENTROPY + AT_SQUARES > 0
    given, top_p_at = tl.load(own + row).to(tl.float32), own + R + row
    temperature = tl.where(given > 0, given, 1.0)
    largest, place = _largest_of(logits, suppressed, V, BLOCK)
    chosen = place
    plain_total, log_total = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if (given > 0) | (F == 0):
        plain_total, log_total = _totals_of(logits, suppressed, temperature, largest, V, BLOCK)
    if F:
        total, slope, squares, second = _model_sums(logits, suppressed, largest, place, V, moments, BLOCK)
        log_sum = tl.log(total)
        entropy, squares = log_sum - slope / total, squares / (total * total)
        margin, top1 = (1.0 - second) / total, 1.0 / total
    if given > 0:
        most = largest / temperature
        least, log_total = _cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        seed = (tl.load(keys + 2 * row + 1) << 32) | tl.load(keys + 2 * row)
        position, draw = tl.load(positions + row).to(tl.uint32), step.to(tl.uint32)
        if draws is not None:
            draw += tl.load(draws + row).to(tl.uint32)
        chosen = _sampled_token(
            logits, suppressed, temperature, least, most, log_total, top_p_at, seed, position, draw, V,
            PURPOSE, TOP_P, BLOCK,
        )  # fmt: skip
        if WARPED:
            law = _law_of(_number_at(logits, suppressed, chosen), temperature, least, most, log_total)
            bound, count = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32)
            whole = tl.full([], 1.0, tl.float64)
            if TOP_P:
                top_p = tl.load(top_p_at)
                if top_p < 1.0:
                    bound, count, whole = _nucleus_of(
                        logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK
                    )
            top1 = tl.exp(law.to(tl.float64)) / whole
            if moments:
                slope, squares, second, best = _law_sums(
                    logits, suppressed, temperature, least, most, log_total, bound, count, place, V, BLOCK
                )
                entropy, squares = tl.log(whole) - slope / whole, squares / (whole * whole)
                margin = (best - second) / whole
    named = chosen
    if scored is not None:
        target = tl.load(scored + row).to(tl.int32)
        named = tl.where(target < 0, chosen, target)
    number = _number_at(logits, suppressed, named)
    tl.store(out, chosen.to(tl.float64))
    if F:
        tl.store(out + R, number.to(tl.float64) - largest.to(tl.float64) - log_sum)
    else:
        tl.store(out + R, ((number - largest) - plain_total).to(tl.float64))
    if AT_TOP1:
        if not WARPED:
            top1 = tl.exp(_number_at(logits, suppressed, chosen).to(tl.float64) - largest.to(tl.float64) - log_sum)
        tl.store(out + AT_TOP1 * R, top1)
    if AT_MARGIN:
        tl.store(out + AT_MARGIN * R, margin)
    if AT_ENTROPY:
        tl.store(out + AT_ENTROPY * R, entropy)
    if AT_SQUARES:
        tl.store(out + AT_SQUARES * R, squares)
    if AT_SCORES:
        tl.store(out + AT_SCORES * R, _log_scores(logits, mask, V, BLOCK))


def sample(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Wanted] = (),
    warped: bool = False,
    draw_R: Tensor | None = None,
    scored_R: Tensor | None = None,
    mask_id: int = -1,
    ahead: int = 0,
    gumbel: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """See sampling_reference.py; logits in float32 or half precision, which stay as they are."""
    assert warp.own_4R is not None and gumbel is None, "a kernel gets each row's settings, and computes its noise"
    assert mask_id >= 0 or "scores" not in wanted, "scores leave out the mask"
    assert logits_RV.stride(1) == 1, "the logits of a row follow each other"
    (num_rows, vocab_size), top_k = logits_RV.shape, warp.job.top_k
    fields_AFR = torch.empty(1 + ahead, 2 + len(wanted), num_rows, dtype=torch.float64, device=logits_RV.device)
    if num_rows:
        asked = (warp.own_4R, key_R2, position_R, draw_R, scored_R)
        sample_rows[(num_rows, 1 + ahead)](
            logits_RV, warp.suppressed_V.view(torch.int8),
            *(None if tensor is None else tensor.contiguous() for tensor in asked),
            fields_AFR, logits_RV.stride(0), num_rows, vocab_size, top_k or 0, mask_id,
            PURPOSE=TARGET, TOP_K=top_k is not None and top_k < vocab_size, TOP_P=warp.cuts,
            F=len(wanted), WARPED=warped and bool(wanted),
            **{f"AT_{name.upper()}": 2 + wanted.index(name) if name in wanted else 0 for name in WANTED},
            BLOCK=max(16, min(_BLOCK, power_of_two(vocab_size))), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return fields_AFR
