"""The code of choice.py for the device: one program a row, which reads the row's logits a few times and writes some numbers.

    1  the maximum and the sum of exponentials, plain and at the row's temperature
    2  top-k only: the k-th largest number, found bit by bit; then the sum of what is left
    3  the noise of every token (Philox4x32-10, Salmon et al., 2011) and the best sum of log-probability and noise
    4  top-p only: the mass before the token. Most tokens are inside of the nucleus, and the row is done
    5  else: the nucleus, found bit by bit; then the best token inside

The functions of these steps are those of laws_kernel.py.
"""

import triton
import triton.language as tl

from draftmill.decoders.kernels.laws_kernel import (
    cut_of,
    largest_of,
    law_of,
    mass_before,
    nucleus_of,
    sampled_token,
    seed_of,
    totals_of,
)


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
    largest, chosen = largest_of(logits, suppressed, V, BLOCK)
    plain_total, log_total = totals_of(logits, suppressed, temperature, largest, V, BLOCK)
    if given > 0:
        most = largest / temperature
        least, log_total = cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        position = tl.load(positions + row).to(tl.uint32)
        chosen = sampled_token(
            logits, suppressed, temperature, least, most, log_total, top_ps + row, seed_of(keys, row),
            position, position * 0, V, PURPOSE, TOP_P, BLOCK,
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
    largest, chosen = largest_of(logits, suppressed, V, BLOCK)
    plain_total, log_total = totals_of(logits, suppressed, temperature, largest, V, BLOCK)
    draft = tl.load(drafts + row).to(tl.int32)
    number = tl.load(logits + draft).to(tl.float32)
    number = tl.where(tl.load(suppressed + draft) != 0, float("-inf"), number)
    log_p = tl.where(draft == chosen, 0.0, float("-inf")).to(tl.float64)
    if given > 0:
        most = largest / temperature
        least, log_total = cut_of(logits, suppressed, temperature, most, log_total, K, V, TOP_K, BLOCK)
        law = law_of(number, temperature, least, most, log_total)
        log_p = law.to(tl.float64)
        if TOP_P:
            top_p = tl.load(top_ps + row)
            if top_p < 1.0:
                own = tl.exp(law)
                before = mass_before(logits, suppressed, temperature, least, most, log_total, own, draft, V, BLOCK)
                _, _, whole = nucleus_of(logits, suppressed, temperature, least, most, log_total, top_p, V, BLOCK)
                log_p = tl.where(before < top_p, log_p - tl.log(whole), float("-inf"))
    tl.store(out_ratios + row, log_p - tl.load(log_qs + row))
    tl.store(out_log_ps + row, ((number - largest) - plain_total).to(tl.float64))
