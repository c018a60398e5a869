"""The code of choice.py for the device: one program a row, which reads the row's logits a few times and writes some numbers.

    1  the maximum and the sum of exponentials, plain and at the row's temperature
    2  top-k only: the k-th largest number, found bit by bit; then the sum of what is left
    3  the noise of every token (Philox4x32-10, Salmon et al., 2011) and the best sum of log-probability and noise
    4  top-p only: the mass before the token. Most tokens are inside of the nucleus, and the row is done
    5  else: the nucleus, found bit by bit; then the best token inside

A number's bits are found from above: 32 passes over a row that the second-level cache holds. No loop's length depends on the
data (which may be NaN). The noise never touches memory.
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(2147483647)


@triton.jit
def _numbers(logits, suppressed, first, V, BLOCK: tl.constexpr):
    """A block of a row's logits, -inf where there is no token or a suppressed one."""
    token = first + tl.arange(0, BLOCK)
    inside = token < V
    number = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    forbidden = tl.load(suppressed + token, mask=inside, other=1)
    return token, tl.where(forbidden != 0, float("-inf"), number)


@triton.jit
def _ordered(number):
    """An integer that grows with a float32."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(logits, suppressed, temperature, most, K, V, BLOCK: tl.constexpr):
    """The K-th largest of the numbers at this temperature: the least one with fewer than K above it."""
    low = tl.full([], -2147483648, tl.int64)
    high = _ordered(most).to(tl.int64)
    for _ in range(32):
        middle = low + ((high - low) >> 1)
        above = tl.full([], 0, tl.int32)
        for first in range(0, V, BLOCK):
            token, number = _numbers(logits, suppressed, first, V, BLOCK)
            bits = _ordered(number / temperature).to(tl.int64)
            above += tl.sum(((bits > middle) & (token < V)).to(tl.int32), 0)
        fits = above < K
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    bits_32 = high.to(tl.int32)
    return (bits_32 ^ ((bits_32 >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _law(number, temperature, least, most, log_total):
    """The log-probabilities at this temperature, cut below `least`."""
    scaled = number / temperature
    return tl.where(scaled >= least, (scaled - most) - log_total, float("-inf"))


@triton.jit
def _mass_above(logits, suppressed, temperature, least, most, log_total, bound, V, BLOCK: tl.constexpr):
    """The mass of all tokens with more mass than `bound`."""
    found = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        _, number = _numbers(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law(number, temperature, least, most, log_total))
        found += tl.sum(tl.where(mass > bound, mass, 0.0).to(tl.float64), 0)
    return found


@triton.jit
def _mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK: tl.constexpr):
    """The mass of the tokens that come before one with mass `own` in the order of mass, among equals of index."""
    found = tl.full([], 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        token, number = _numbers(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law(number, temperature, least, most, log_total))
        before = (mass > own) | ((mass == own) & (token < chosen))
        found += tl.sum(tl.where(before, mass, 0.0).to(tl.float64), 0)
    return found


@triton.jit
def _nucleus(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK: tl.constexpr):
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
        token, number = _numbers(logits, suppressed, first, V, BLOCK)
        mass = tl.exp(_law(number, temperature, least, most, log_total))
        equal += tl.sum(((mass == bound) & (token < V)).to(tl.int32), 0)
    each = bound.to(tl.float64)
    wanted = tl.ceil((top_p - above) / tl.where(each > 0, each, 1.0))
    count = tl.where(each > 0, tl.minimum(wanted, equal.to(tl.float64)).to(tl.int32), equal)
    return bound, count, above + count.to(tl.float64) * each


@triton.jit
def _gumbel(seed, position, first, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The noise of a block of tokens: four neighbours share a counter."""
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # As in decoders/draws/noise.py: close to one the inner logarithm needs float64.
    uniform = (word.to(tl.uint32).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log((-tl.log(uniform)).to(tl.float32))


@triton.jit
def _draw(
    logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, V,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token with the largest sum of log-probability and noise, the first of several; from the nucleus, if `count` > 0."""
    best, chosen = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = _numbers(logits, suppressed, first, V, BLOCK)
        law = _law(number, temperature, least, most, log_total)
        if count > 0:
            mass = tl.exp(law)
            same = ((mass == bound) & (token < V)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0) - same
            law = tl.where((mass > bound) | ((same > 0) & (rank < count)), law, float("-inf"))
            equal += tl.sum(same, 0)
        score = law + _gumbel(seed, position, first, PURPOSE, BLOCK)
        top = tl.max(score, 0)
        where = tl.min(tl.where(score == top, token, _NONE), 0)
        better = top > best
        chosen = tl.where(better, where, chosen)
        best = tl.where(better, top, best)
    return chosen


@triton.jit
def _totals(logits, suppressed, temperature, V, BLOCK: tl.constexpr):
    """The largest number, its first place, and the logarithms of the sums of exponentials at temperature 1 and at this one."""
    most, where = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, V, BLOCK):
        token, number = _numbers(logits, suppressed, first, V, BLOCK)
        top = tl.max(number, 0)
        place = tl.min(tl.where(number == top, token, _NONE), 0)
        where = tl.where(top > most, place, where)
        most = tl.maximum(most, top)
    total, warm = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for first in range(0, V, BLOCK):
        _, number = _numbers(logits, suppressed, first, V, BLOCK)
        total += tl.sum(tl.exp(number - most), 0)
        warm += tl.sum(tl.exp(number / temperature - most / temperature), 0)
    return most, where, tl.log(total), tl.log(warm)


@triton.jit
def _cut(logits, suppressed, temperature, most, log_total, K, V, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The least number that top-k leaves, and the logarithm of the sum of what is left."""
    least = tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        least = _kth_largest(logits, suppressed, temperature, most, K, V, BLOCK)
        total = tl.full([], 0.0, tl.float32)
        for first in range(0, V, BLOCK):
            _, number = _numbers(logits, suppressed, first, V, BLOCK)
            total += tl.sum(tl.exp(_law(number, temperature, least, most, 0.0)), 0)
        log_total = tl.log(total)
    return least, log_total


@triton.jit
def choose_rows(
    logits,
    suppressed,
    temperatures,
    top_ps,
    keys,
    positions,
    drafts,
    scored,
    out_tokens,
    out_log_ps,
    out_accepted,
    logits_r,
    V,
    K,
    PURPOSE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See the module's docstring."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_r
    given = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(given > 0, given, 1.0)
    largest, chosen, plain_total, log_total = _totals(logits, suppressed, temperature, V, BLOCK)
    if given > 0:
        most = largest / temperature
        least, log_total = _cut(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        low, high = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        seed = (high << 32) | low
        position = tl.load(positions + row).to(tl.uint32)
        chosen = _draw(
            logits, suppressed, temperature, least, most, log_total, 0.0, 0, seed, position, V, PURPOSE, BLOCK
        )
        if TOP_P:
            top_p = tl.load(top_ps + row)
            if top_p < 1.0:
                number = tl.load(logits + chosen).to(tl.float32)
                own = tl.exp(_law(number, temperature, least, most, log_total))
                before = _mass_before(logits, suppressed, temperature, least, most, log_total, own, chosen, V, BLOCK)
                if before >= top_p:
                    bound, count, _ = _nucleus(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK)
                    chosen = _draw(
                        logits, suppressed, temperature, least, most, log_total, bound, count, seed, position, V,
                        PURPOSE, BLOCK,
                    )  # fmt: skip
    named = tl.load(scored + row).to(tl.int32)
    named = tl.where(named < 0, chosen, named)
    number = tl.load(logits + named).to(tl.float32)
    number = tl.where(tl.load(suppressed + named) != 0, float("-inf"), number)
    tl.store(out_tokens + row, chosen.to(tl.int64))
    tl.store(out_log_ps + row, ((number - largest) - plain_total).to(tl.float64))
    tl.store(out_accepted + row, (chosen == tl.load(drafts + row).to(tl.int32)).to(tl.int8))


@triton.jit
def weigh_rows(
    logits,
    suppressed,
    temperatures,
    top_ps,
    drafts,
    log_qs,
    out_ratios,
    out_log_ps,
    logits_r,
    V,
    K,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The ratio of a draft's probabilities, p from the logits and q as given; no noise is drawn."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_r
    given = tl.load(temperatures + row).to(tl.float32)
    temperature = tl.where(given > 0, given, 1.0)
    largest, chosen, plain_total, log_total = _totals(logits, suppressed, temperature, V, BLOCK)
    draft = tl.load(drafts + row).to(tl.int32)
    number = tl.load(logits + draft).to(tl.float32)
    number = tl.where(tl.load(suppressed + draft) != 0, float("-inf"), number)
    log_p = tl.where(draft == chosen, 0.0, float("-inf")).to(tl.float64)
    if given > 0:
        most = largest / temperature
        least, log_total = _cut(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        law = _law(number, temperature, least, most, log_total)
        log_p = law.to(tl.float64)
        if TOP_P:
            top_p = tl.load(top_ps + row)
            if top_p < 1.0:
                own = tl.exp(law)
                before = _mass_before(logits, suppressed, temperature, least, most, log_total, own, draft, V, BLOCK)
                _, _, whole = _nucleus(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK)
                log_p = tl.where(before < top_p, log_p - tl.log(whole), float("-inf"))
    tl.store(out_ratios + row, log_p - tl.load(log_qs + row))
    tl.store(out_log_ps + row, ((number - largest) - plain_total).to(tl.float64))
