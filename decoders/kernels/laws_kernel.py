"""What the kernels over rows of logits share, choice_kernel.py and notes_kernel.py: numbers, sums, cuts, noise and draws.

A row is read a few times, in blocks; the second-level cache holds it. A number's bits are found from above: 32 passes. No loop's
length depends on the data (which may be NaN). The noise never touches memory.
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)


@triton.jit
def numbers_at(logits, suppressed, first, V, BLOCK: tl.constexpr):
    """A block of a row's logits, -inf where there is no token or a suppressed one."""
    token = first + tl.arange(0, BLOCK)
    inside = token < V
    number = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    forbidden = tl.load(suppressed + token, mask=inside, other=1)
    return token, tl.where(forbidden != 0, float("-inf"), number)


@triton.jit
def ordered(number):
    """An integer that grows with a float32."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(logits, suppressed, temperature, most, K, V, BLOCK: tl.constexpr):
    """The K-th largest of the numbers at this temperature: the least one with fewer than K above it."""
    low = tl.full([], -2147483648, tl.int64)
    high = ordered(most).to(tl.int64)
    for _ in range(32):
        middle = low + ((high - low) >> 1)
        above = tl.full([], 0, tl.int32)
        for first in range(0, V, BLOCK):
            token, number = numbers_at(logits, suppressed, first, V, BLOCK)
            bits = ordered(number / temperature).to(tl.int64)
            above += tl.sum(((bits > middle) & (token < V)).to(tl.int32), 0)
        fits = above < K
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    bits_32 = high.to(tl.int32)
    return (bits_32 ^ ((bits_32 >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def law_of(number, temperature, least, most, log_total):
    """The log-probabilities at this temperature, cut below `least`."""
    scaled = number / temperature
    return tl.where(scaled >= least, (scaled - most) - log_total, float("-inf"))


@triton.jit
def mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK: tl.constexpr):
    """The mass of all tokens with more mass than `bound`."""
    found = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        _, number = numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(law_of(number, temperature, least, most, log_total))
        found += tl.sum(tl.where(mass > bound, mass, 0.0).to(tl.float64), 0)
    return found


@triton.jit
def mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK: tl.constexpr):
    """The mass of the tokens that come before one with mass `own` in the order of mass, among equals of index."""
    found = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(law_of(number, temperature, least, most, log_total))
        before = (mass > own) | ((mass == own) & (token < chosen))
        found += tl.sum(tl.where(before, mass, 0.0).to(tl.float64), 0)
    return found


@triton.jit
def nucleus_of(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK: tl.constexpr):
    """The least mass in the nucleus, how many of the tokens with just that mass belong to it, and the nucleus' whole mass."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0x40000000, tl.int32)  # 0 and 2, as bits
    for _ in range(31):
        middle = (low + high) >> 1
        bound = middle.to(tl.float32, bitcast=True)
        above = mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK)
        fits = above < top_p
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    bound = high.to(tl.float32, bitcast=True)
    above = mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(law_of(number, temperature, least, most, log_total))
        equal += tl.sum(((mass == bound) & (token < V)).to(tl.int32), 0)
    each = bound.to(tl.float64)
    wanted = tl.ceil((top_p - above) / tl.where(each > 0, each, 1.0))
    count = tl.where(each > 0, tl.minimum(wanted, equal.to(tl.float64)).to(tl.int32), equal)
    return bound, count, above + count.to(tl.float64) * each


@triton.jit
def gumbel_at(seed, position, draw, first, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The noise of a block of tokens: four neighbours share a counter."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero + draw)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # As in decoders/draws/noise.py: close to one the inner logarithm needs float64.
    uniform = (word.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log((-tl.log(uniform)).to(tl.float32))


@triton.jit
def draw_token(
    logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, draw, V,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the largest sum of log-probability and noise, the first of several; from the nucleus, if `count` > 0."""
    best, chosen = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        law = law_of(number, temperature, least, most, log_total)
        if count > 0:
            mass = tl.exp(law)
            same = ((mass == bound) & (token < V)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0) - same
            law = tl.where((mass > bound) | ((same > 0) & (rank < count)), law, float("-inf"))
            equal += tl.sum(same, 0)
        score = law + gumbel_at(seed, position, draw, first, PURPOSE, BLOCK)
        top = tl.max(score, 0)
        where = tl.min(tl.where(score == top, token, _NONE), 0)
        better = top > best
        chosen = tl.where(better, where, chosen)
        best = tl.where(better, top, best)
    return chosen


@triton.jit
def largest_of(logits, suppressed, V, BLOCK: tl.constexpr):
    """The largest number, and its first place."""
    most, where = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = numbers_at(logits, suppressed, first, V, BLOCK)
        top = tl.max(number, 0)
        place = tl.min(tl.where(number == top, token, _NONE), 0)
        where = tl.where(top > most, place, where)
        most = tl.maximum(most, top)
    return most, where


@triton.jit
def totals_of(logits, suppressed, temperature, most, V, BLOCK: tl.constexpr):
    """The logarithms of the sums of exponentials at temperature 1 and at this one."""
    total, warm = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, V, BLOCK):
        _, number = numbers_at(logits, suppressed, first, V, BLOCK)
        total += tl.sum(tl.exp(number - most), 0)
        warm += tl.sum(tl.exp(number / temperature - most / temperature), 0)
    return tl.log(total), tl.log(warm)


@triton.jit
def cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The least number that top-k leaves, and the logarithm of the sum of what is left."""
    least = tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        least = kth_largest(logits, suppressed, temperature, most, K, V, BLOCK)
        total = tl.full([], 0.0, tl.float32)
        for first in range(0, V, BLOCK):
            _, number = numbers_at(logits, suppressed, first, V, BLOCK)
            total += tl.sum(tl.exp(law_of(number, temperature, least, most, 0.0)), 0)
        log_total = tl.log(total)
    return least, log_total


@triton.jit
def sampled_token(
    logits, suppressed, temperature, least, most, log_total, top_p_at, seed, position, draw, V,
    PURPOSE: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token that the noise of a position and draw gives. Most lie in the nucleus; it is found for the others alone."""
    chosen = draw_token(
        logits, suppressed, temperature, least, most, log_total, 0.0, 0, seed, position, draw, V, PURPOSE, BLOCK
    )
    if TOP_P:
        top_p = tl.load(top_p_at)
        if top_p < 1.0:
            number = tl.load(logits + chosen).to(tl.float32)
            own = tl.exp(law_of(number, temperature, least, most, log_total))
            before = mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK)
            if before >= top_p:
                bound, count, _ = nucleus_of(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK)
                chosen = draw_token(
                    logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, draw, V,
                    PURPOSE, BLOCK,
                )  # fmt: skip
    return chosen


@triton.jit
def seed_of(keys, row):
    """The key of a row as one number of 64 bits."""
    return (tl.load(keys + 2 * row + 1) << 32) | tl.load(keys + 2 * row)
