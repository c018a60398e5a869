"""From logits to tokens and what decoders want to know of each row, in Triton: draws/sampling.py on a GPU.

One or two launches in place of some hundred. The integers of the noise are the reference's. Logarithms and sums are rounded by
the device, so that a token may differ where two candidates are equal but for that. Where notes are wanted, sums over the model's
own distribution are float64, as in the reference, so that decoders sort masks alike and compare them with the same thresholds;
those over warped distributions are float64 sums of float32 numbers.

`read_parts` reads parts of a row, of fixed size, with a program for each: few rows keep a whole GPU busy, and a row has the same
bits beside any others. `sample_rows` has a program for each row and draw. It joins the parts, and reads the row again only where
top-k or top-p cuts it, or where notes are wanted. Passes over the vocabulary:

    every row         1   maximum, sum of exponentials, best sum of logit and noise (Philox4x32-10, Salmon et al., 2011)
    top-k             1   also counts the first digits of the numbers, by one program a row
                      +1  counts the second digits of those whose first is that of the K-th largest
                      +1  counts their third digits, which gives the K-th largest; adds up masses by first digits, for top-p
    top-p alone       +1  adds up masses by first digits
    top-p             +2  by second and third digits, which gives the least mass in the nucleus
    top-k or top-p    +1  the best of the tokens that are left; only blocks that have any make noise
    notes             +1  sums over the model's own distribution in float64, +1 over the warped one, +1 for scores

So a plain row takes one pass, top-k four, top-p five, and both six. A float32 has digits of 11, 11 and 10 bits. Masses are
exp(number - maximum) in units of 2^-40: the sum of integers is the same in any order. No loop's length depends on the data, which
may be NaN. The noise never touches memory.

Variants that Triton compiles for a model and its notes: `read_parts` in one, `sample_rows` in one, or two if only some rows of a
job have a top-p. The number of rows makes no others, nor does the alignment of tensors but the logits, which torch aligns.

Legend: R rows, V vocabulary, F wanted notes, A draws.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.decoders.draws.keys import TARGET
from draftmill.decoders.draws.sampling import Warp
from draftmill.decoders.draws.settings import NOTES, Note
from draftmill.decoders.kernels.seen import power_of_two

_BLOCK: Final = 2048
"""The most tokens that a program reads at once."""
_PART = tl.constexpr(8192)
_BINS = tl.constexpr(2048)
_NONE = tl.constexpr(2147483647)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: differences from it are no NaN
_UNALIGNED: Final = ("own", "keys", "positions", "draws", "scored", "out", "parts", "bins")


@triton.jit
def _block_of(row, first, BLOCK: tl.constexpr):
    """A block of a row's logits, and divided by its temperature; -inf where there is no token or a suppressed one. `row` are its
    logits, the marks of suppressed ids, the temperature, and V."""
    logits, suppressed, temperature, V = row
    token = first + tl.arange(0, BLOCK)
    inside = token < V
    number = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    forbidden = tl.load(suppressed + token, mask=inside, other=1)
    number = tl.where(forbidden != 0, float("-inf"), number)
    return token, number, number / temperature


@triton.jit
def _number_at(row, token):
    """One of a row's logits, -inf if it is suppressed."""
    return tl.where(tl.load(row[1] + token) != 0, float("-inf"), tl.load(row[0] + token).to(tl.float32))


@triton.jit
def _best_of(score, token):
    """The largest score and the first token that has it; token 0 if there is none."""
    best = tl.max(score, 0)
    return best, tl.where(best > float("-inf"), tl.min(tl.where(score == best, token, _NONE), 0), 0)


@triton.jit
def gumbel_of(word):
    """Gumbel noise -log(-log u), u = (word + 0.5) / 2^32, without float64. Close to one, float32 has too few bits for u, but not
    for v = 1 - u, which the word's complement gives: -log u is 2 atanh(v / (2 - v)). It is off by at most 1.1e-6, half a step of
    the largest numbers, and by 4.1e-7 below one (measured on every 13th word and on the 2^24 words at both ends)."""
    v = ((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = v / (2.0 - v)
    q = s * s
    near = 2.0 * s * (1.0 + q * (0.3333333333 + q * (0.2 + q * 0.1428571429)))
    far = -tl.log((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    return -tl.log(tl.where(v < 0.25, near, far))


@triton.jit
def _gumbel_at(noise, first, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The noise of a block of tokens: four neighbours share a counter. `noise` are the row's key, position and draw."""
    seed, position, draw = noise
    quad = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position, zero + PURPOSE, zero + draw)
    return gumbel_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.uint32))


@triton.jit
def _settings_of(own, keys, positions, draws, row, step, R):
    """A row's temperature (1 for 0), whether it is drawn at all, its top-p, and where its noise begins."""
    given, top_p = tl.load(own + row).to(tl.float32), tl.load(own + R + row)
    seed = (tl.load(keys + 2 * row + 1) << 32) | tl.load(keys + 2 * row)
    draw = step.to(tl.uint32)
    if draws is not None:
        draw += tl.load(draws + row).to(tl.uint32)
    return tl.where(given > 0, given, 1.0), given > 0, top_p, (seed, tl.load(positions + row).to(tl.uint32), draw)


@triton.jit
def _read_part(
    row, is_drawn, noise, parts, bins, part,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes of one part: the maximum, the sum of exponentials relative to it, its place, the best sum of number / temperature
    and noise relative to it, and its token. Each lane keeps its own first. `COUNT`: first digits are counted, too."""
    most, place = tl.full([BLOCK], _LOWEST, tl.float32), tl.zeros([BLOCK], tl.int32)
    total, chosen = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    best, its_gumbel = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(part * _PART, tl.minimum(part * _PART + _PART, row[3]), BLOCK):
        token, number, scaled = _block_of(row, first, BLOCK)
        ratio, higher = tl.exp(-tl.abs(number - most)), number > most
        total = tl.where(higher, total * ratio + 1.0, total + ratio)
        place = tl.where(higher, token, place)
        most = tl.where(higher, number, most)
        if is_drawn:
            gumbel = _gumbel_at(noise, first, PURPOSE, BLOCK)
            better = (scaled - best) + (gumbel - its_gumbel) > 0
            best, its_gumbel = tl.where(better, scaled, best), tl.where(better, gumbel, its_gumbel)
            chosen = tl.where(better, token, chosen)
        if COUNT:
            tl.atomic_add(bins + _digit(_sort_key(scaled), 21), 1, mask=token < row[3], sem="relaxed")
    largest, where = _best_of(most, place)
    score, token = _best_of((best - largest / row[2]) + its_gumbel, chosen)
    parts += part
    tl.store(parts, largest)
    tl.store(parts + PARTS, tl.sum(total * tl.exp(most - largest), 0))
    tl.store(parts + 2 * PARTS, where.to(tl.float32))
    tl.store(parts + 3 * PARTS, score)
    tl.store(parts + 4 * PARTS, token.to(tl.float32))


@triton.jit
def _join_parts(row, parts, PARTS: tl.constexpr):
    """Of a row: the maximum and its place, the logarithm of the sum of exponentials relative to it, and the token drawn."""
    part = tl.arange(0, PARTS)
    inside = part * _PART < row[3]
    most = tl.load(parts + part, mask=inside, other=_LOWEST)
    total = tl.load(parts + PARTS + part, mask=inside, other=0.0)
    place = tl.load(parts + 2 * PARTS + part, mask=inside, other=0.0).to(tl.int32)
    score = tl.load(parts + 3 * PARTS + part, mask=inside, other=float("-inf"))
    token = tl.load(parts + 4 * PARTS + part, mask=inside, other=0.0).to(tl.int32)
    largest, where = _best_of(most, place)
    _, chosen = _best_of((most / row[2] - largest / row[2]) + score, token)
    return largest, where, tl.log(tl.sum(total * tl.exp(most - largest), 0)), chosen


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=_UNALIGNED)
def read_parts(
    logits, suppressed, own, keys, positions, draws, parts, logits_r, R, V,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first pass over one part of a row, for one draw, in a job without top-k."""
    row, step = tl.program_id(0), tl.program_id(1)
    temperature, is_drawn, top_p, noise = _settings_of(own, keys, positions, draws, row, step, R)
    _read_part(
        (logits + row.to(tl.int64) * logits_r, suppressed, temperature, V), is_drawn and top_p >= 1.0, noise,
        parts + (step * R + row).to(tl.int64) * (5 * PARTS), None, tl.program_id(2), PURPOSE, PARTS, False, BLOCK,
    )  # fmt: skip


# ---- cuts ------------------------------------------------------------------------------------------------------------


@triton.jit
def _sort_key(number):
    """A uint32 that grows with a float32."""
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _number_of(key):
    """The float32 of a sort key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _digit(key, shift):
    """One of a uint32's three digits, by its first bit: bits 21 to 31, 10 to 20, or 0 to 9."""
    return ((key >> shift) & tl.where(shift == 0, 1023, 2047)).to(tl.int32)


@triton.jit
def _begins(key, start, shift):
    """Whether all digits before that one are `start`."""
    return ((key >> shift) >> tl.where(shift == 0, 10, 11)) == start


@triton.jit
def _mass_of(scaled, most):
    """exp(number - maximum) as float32, as the bits of it, and in units of 2^-40; 0 for what is NaN."""
    mass = tl.exp(scaled - most)
    mass = tl.where(mass > 0, mass, 0.0)
    return mass, mass.to(tl.uint32, bitcast=True), (mass * 1099511627776.0).to(tl.int64)


@triton.jit
def _fill(row, bins, most, start, shift, least, COUNT: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """One pass over a row. `COUNT`: it counts the numbers that begin with `start` by their digits at bit `shift`; in the last
    such pass, with `MASS`, it also adds up the masses of larger ones, by first digits. Not `COUNT`: it adds up the masses that
    begin with `start`, of numbers from `least` on."""
    for first in range(0, row[3], BLOCK):
        token, _, scaled = _block_of(row, first, BLOCK)
        if COUNT:
            key = _sort_key(scaled)
            counted = (token < row[3]) & _begins(key, start, shift)
            tl.atomic_add(bins + _digit(key, shift), 1, mask=counted, sem="relaxed")
        if MASS:
            _, bits, weight = _mass_of(scaled, most)
            if COUNT:
                added, digit = ((key >> 10) > start) & (shift == 0), _digit(bits, 21)
            else:
                added, digit = (scaled >= least) & _begins(bits, start, shift), _digit(bits, shift)
            tl.atomic_add(bins + _BINS + digit, weight, mask=added & (weight > 0), sem="relaxed")


@triton.jit
def _emptied(bins):
    """What the bins hold; they are empty afterwards. Threads of a program write and read them, past the first-level cache."""
    tl.debug_barrier()
    held = tl.load(bins + tl.arange(0, _BINS), volatile=True)
    tl.debug_barrier()
    tl.store(bins + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int64))
    tl.debug_barrier()
    return held


@triton.jit
def _find(held, key, level, target):
    """The key with one more digit: that at which the sum of the bins, from the last one down, reaches the target; and what of the
    target is left for its bin."""
    reached = tl.sum(held, 0) - tl.cumsum(held, 0) + held
    digit = tl.maximum(tl.sum((reached >= target).to(tl.int32), 0) - 1, 0)
    left = target - tl.sum(tl.where(tl.arange(0, _BINS) > digit, held, 0), 0)
    return (key << tl.where(level == 2, 10, 11)) | digit.to(tl.uint32), left


@triton.jit
def _kth_largest(row, bins, most, K, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The K-th largest number, whose first digits are counted; with `MASS` first digits of the masses from it on are added up."""
    key, left, held = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64) + K, tl.zeros([_BINS], tl.int64)
    for level in range(3):
        if level > 0:
            _fill(row, bins, most, key, 20 - 10 * level, 0.0, True, MASS, BLOCK)
        held = _emptied(bins)
        key, left = _find(held, key, level, left)
    if MASS:
        # The masses of numbers with the first two digits of the K-th largest follow from their counts.
        other = ((key >> 10) << 10) + tl.arange(0, _BINS).to(tl.uint32)
        _, bits, weight = _mass_of(_number_of(other), most)
        added = (other >= key) & (held > 0)
        tl.atomic_add(bins + _BINS + _digit(bits, 21), weight * held, mask=added, sem="relaxed")
    return _number_of(key)


@triton.jit
def _nucleus_of(row, bins, most, least, top_p, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The least mass in the nucleus, and how many of the tokens with just that mass are in it. `TOP_K` did the first pass."""
    key, left = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64)
    for level in range(3):
        if level > 0 or not TOP_K:
            _fill(row, bins, most, key, tl.where(level == 0, 21, 20 - 10 * level), least, False, True, BLOCK)
        held = _emptied(bins + _BINS)
        if level == 0:
            left = tl.maximum(tl.ceil(top_p * tl.sum(held, 0).to(tl.float64)).to(tl.int64), 1)
        key, left = _find(held, key, level, left)
    bound = key.to(tl.float32, bitcast=True)
    each = tl.maximum((bound * 1099511627776.0).to(tl.int64), 1)
    return bound, ((left + each - 1) // each).to(tl.int32)


@triton.jit
def _kept(mass, scaled, cut, equal):
    """Which tokens are left: numbers from `least` on and masses above `bound`; of those with just that mass the first `count`, of
    which `equal` came before. These three are `cut`."""
    least, bound, count = cut
    kept = (mass > bound) & (scaled >= least)
    if count > 0:
        same = ((mass == bound) & (scaled >= least)).to(tl.int32)
        kept = kept | ((same > 0) & (equal + tl.cumsum(same, 0) <= count))
        equal += tl.sum(same, 0)
    return kept, equal


@triton.jit
def _draw_kept(row, most, cut, noise, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """The token that is left with the largest sum of log-probability and noise, the first of several."""
    best, chosen = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    equal = tl.full([], 0, tl.int32)
    for first in range(0, row[3], BLOCK):
        token, _, scaled = _block_of(row, first, BLOCK)
        mass, _, _ = _mass_of(scaled, most)
        kept, equal = _kept(mass, scaled, cut, equal)
        if tl.max(kept.to(tl.int32), 0) > 0:
            score = (scaled - most) + _gumbel_at(noise, first, PURPOSE, BLOCK)
            better = kept & (score > best)
            best, chosen = tl.where(better, score, best), tl.where(better, token, chosen)
    return _best_of(best, chosen)[1]


@triton.jit
def _notes_of(row, most, cut, MOMENTS: tl.constexpr, WARPED: tl.constexpr, BLOCK: tl.constexpr):
    """Of e = exp(number - maximum): the sum. With `MOMENTS` also the entropy, the sum of squared probabilities, and the margin of
    the best. `WARPED`: of what is left by top-k and top-p, in float32; else of all in float64. The sums are float64."""
    total, slope = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    squares, second = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    equal, ones = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, row[3], BLOCK):
        _, _, scaled = _block_of(row, first, BLOCK)
        below = scaled - most if WARPED else scaled.to(tl.float64) - most.to(tl.float64)
        mass = tl.exp(below)
        if WARPED:
            kept, equal = _kept(mass, scaled, cut, equal)
            mass = tl.where(kept, mass, 0.0)
        total += tl.sum(mass.to(tl.float64), 0)
        if MOMENTS:
            slope += tl.sum(tl.where(mass > 0, mass * below, 0.0).to(tl.float64), 0)
            squares += tl.sum((mass * mass).to(tl.float64), 0)
            ones += tl.sum((mass == 1.0).to(tl.int32), 0)
            second = tl.maximum(second, tl.max(tl.where(mass < 1.0, mass, 0.0), 0).to(tl.float64))
    margin = tl.where(ones > 1, 0.0, (1.0 - second) / total)
    return total, tl.log(total) - slope / total, squares / (total * total), margin


@triton.jit
def _log_scores(row, mask, BLOCK: tl.constexpr):
    """The logarithm of the sum of exponentials of all numbers but that of the mask, also of suppressed ids; float64."""
    most, total = tl.full([BLOCK], _LOWEST, tl.float64), tl.zeros([BLOCK], tl.float64)
    for first in range(0, row[3], BLOCK):
        token = first + tl.arange(0, BLOCK)
        number = tl.load(row[0] + token, mask=(token < row[3]) & (token != mask), other=float("-inf")).to(tl.float64)
        higher = tl.maximum(most, number)
        total = total * tl.exp(most - higher) + tl.exp(number - higher)
        most = higher
    largest = tl.max(most, 0)
    return largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=_UNALIGNED)
def sample_rows(
    logits, suppressed, own, keys, positions, draws, scored, out, parts, bins, logits_r, R, V, K, mask,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, IS_READ: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    F: tl.constexpr, WARPED: tl.constexpr, AT_TOP1: tl.constexpr, AT_MARGIN: tl.constexpr, AT_ENTROPY: tl.constexpr,
    AT_SQUARES: tl.constexpr, AT_SCORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See the module's docstring. AT_ says in which row of `out` a note goes; 0, which is the token's, that it is not wanted.
    `own` are temperatures, then top-p. `draws` and `scored` may be None. `IS_READ`: read_parts has read the parts."""
    number, step = tl.program_id(0), tl.program_id(1)
    program = (step * R + number).to(tl.int64)
    parts += program * (5 * PARTS)
    out += step * (2 + F) * R + number
    moments: tl.constexpr = AT_MARGIN + AT_ENTROPY + AT_SQUARES > 0
    temperature, is_drawn, top_p, noise = _settings_of(own, keys, positions, draws, number, step, R)
    row = logits + number.to(tl.int64) * logits_r, suppressed, temperature, V
    if TOP_K or TOP_P:
        bins += program * (2 * _BINS)
        tl.store(bins + tl.arange(0, 2 * _BINS), tl.zeros([2 * _BINS], tl.int64))
        tl.debug_barrier()
    if not IS_READ:
        is_plain = is_drawn and top_p >= 1.0 and not TOP_K
        for part in range(0, tl.cdiv(V, _PART)):
            _read_part(row, is_plain, noise, parts, bins, part, PURPOSE, PARTS, TOP_K, BLOCK)
        tl.debug_barrier()
    largest, place, log_total, drawn = _join_parts(row, parts, PARTS)
    chosen = tl.where(is_drawn, drawn, place)
    most, least = largest / temperature, tl.full([], float("-inf"), tl.float32)
    bound, count = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    if TOP_K or TOP_P:
        has_nucleus = TOP_P and top_p < 1.0
        if is_drawn and (TOP_K or has_nucleus):
            if TOP_K:
                least = _kth_largest(row, bins, most, K, TOP_P, BLOCK)
            if has_nucleus:
                bound, count = _nucleus_of(row, bins, most, least, top_p, TOP_K, BLOCK)
            chosen = _draw_kept(row, most, (least, bound, count), noise, PURPOSE, BLOCK)
    named = chosen
    if scored is not None:
        target = tl.load(scored + number).to(tl.int32)
        named = tl.where(target < 0, chosen, target)
    tl.store(out, chosen.to(tl.float64))
    if F == 0:
        tl.store(out + R, ((_number_at(row, named) - largest) - log_total).to(tl.float64))
    else:
        cut, exact = (least, bound, count), largest.to(tl.float64)
        plain = row[0], suppressed, 1.0, V
        total, entropy, squares, margin = _notes_of(plain, largest, cut, moments, False, BLOCK)
        tl.store(out + R, _number_at(row, named).to(tl.float64) - exact - tl.log(total))
        top1 = tl.exp(_number_at(row, chosen).to(tl.float64) - exact - tl.log(total))
        if WARPED and is_drawn:
            total, entropy, squares, margin = _notes_of(row, most, cut, moments, True, BLOCK)
            top1 = tl.exp((_number_at(row, chosen) / temperature - most).to(tl.float64)) / total
        if AT_TOP1:
            tl.store(out + AT_TOP1 * R, top1)
        if AT_MARGIN:
            tl.store(out + AT_MARGIN * R, margin)
        if AT_ENTROPY:
            tl.store(out + AT_ENTROPY * R, entropy)
        if AT_SQUARES:
            tl.store(out + AT_SQUARES * R, squares)
        if AT_SCORES:
            tl.store(out + AT_SCORES * R, _log_scores(row, mask, BLOCK))


def sample(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Note] = (),
    warped: bool = False,
    draw_R: Tensor | None = None,
    scored_R: Tensor | None = None,
    mask_id: int = -1,
    ahead: int = 0,
) -> Tensor:
    """See draws/sampling.py; logits in float32 or half precision, which stay as they are. All rows have the top-k of
    `warp.uses`; their own, their min-p and changes of their logits are ignored."""
    assert mask_id >= 0 or "scores" not in wanted, "scores have no mask"
    assert logits_RV.stride(1) == 1, "the logits of a row follow each other"
    (num_rows, vocab_size), device = logits_RV.shape, logits_RV.device
    top_k, has_top_p = warp.uses.top_k, warp.uses.top_p
    grid = (num_rows, 1 + ahead)
    fields_AFR = torch.empty(1 + ahead, 2 + len(wanted), num_rows, dtype=torch.float64, device=device)
    if not num_rows:
        return fields_AFR
    asked = (warp.settings_4R, key_R2, position_R, draw_R, scored_R)
    *noise, scored_R = (None if tensor is None else tensor.contiguous() for tensor in asked)
    read = logits_RV, warp.suppressed_V.view(torch.int8), *noise
    num_parts, has_k = triton.cdiv(vocab_size, _PART.value), 0 < top_k < vocab_size
    parts = torch.empty(*grid, 5, power_of_two(num_parts), dtype=torch.float32, device=device)
    bins = torch.empty(*grid, 2, _BINS.value, dtype=torch.int64, device=device) if has_k or has_top_p else None
    is_read = num_parts > 1 and not has_k
    sizes = logits_RV.stride(0), num_rows, vocab_size
    shared = {
        "PURPOSE": TARGET, "PARTS": parts.shape[3], "BLOCK": max(16, min(_BLOCK, power_of_two(vocab_size))),
        "num_warps": 16, "enable_fp_fusion": False,
    }  # fmt: skip
    if is_read:
        read_parts[(*grid, num_parts)](*read, parts, *sizes, **shared)
    sample_rows[grid](
        *read, scored_R, fields_AFR, parts, bins, *sizes, top_k, mask_id, **shared,
        IS_READ=is_read, TOP_K=has_k, TOP_P=has_top_p, F=len(wanted), WARPED=warped and bool(wanted),
        **{f"AT_{name.upper()}": 2 + wanted.index(name) if name in wanted else 0 for name in NOTES},
    )  # fmt: skip
    return fields_AFR
