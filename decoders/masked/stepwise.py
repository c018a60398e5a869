"""`stepwise`, `threshold` and `factor`: masked diffusion without speculation; they differ in masks per forward.

    canvas       the big _   sat _  _  .         the masks of the first block that has any
    forward            cat .9    on .6 mat .3    a token for each, and how sure the model is of it
    stepwise     the big cat sat _  _  .         the surest one (or the number that a schedule gives)
    threshold    the big cat sat on _  .         all above tau = 0.5

    stepwise    a schedule of tokens per step, or of steps; one token per step is the baseline that `ssd` equals
    threshold   all with confidence above a threshold, at least the most confident one
    factor      more at once need higher confidences: the largest n with (n + 1) (1 - c_n) < factor, c_n the n-th
                highest confidence, at least one

More than one token per forward is lossy: tokens revealed together do not see each other.

Differs on purpose from Wu et al., "Fast-dLLM" (2025), which reveals the first token of a block of Dream whatever its confidence.

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025); Wu et al., "Fast-dLLM" (2025),
section 3.3.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final

import numpy as np

from draftmill.decoders.draws.settings import Note
from draftmill.decoders.engine.algorithm import Algorithm, no_prompt
from draftmill.decoders.engine.asks import Answer, Ask, Decoding
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.canvas import Canvas, Pick, Windows
from draftmill.decoders.masked.settings import FactorSettings, MaskedSettings, StepwiseSettings, ThresholdSettings

# The end time of Dream's schedule.
_LAST_TIME: Final = 1e-3
Quota = Callable[[int], int]
"""The number of masks that a forward reveals, given the number of those that may come next."""
Count = Callable[[list[float]], int]
"""The number of tokens to reveal, given the confidences of those that may come next, the highest first."""


def stepwise(
    s: Canvas,
    settings: MaskedSettings,
    shift: int,
    quota_of: Callable[[Canvas], Quota] = lambda s: lambda masks: masks,
    count: Count | None = None,
) -> Decoding:
    """Reveal by a schedule, or the number of tokens that their confidences allow."""
    windows, quota = Windows(s, settings, shift), quota_of(s)
    while s.holes:
        picks = yield from surest(s, windows, quota)
        s.reveal(picks if count is None else picks[: count([-less_sure for less_sure, *_ in picks])])


def surest(s: Canvas, windows: Windows, quota: Quota) -> Generator[Ask, Answer, list[Pick]]:
    """Run the canvas, or what the cache leaves to run; the surest of the masks that may come next."""
    block, asked, settings = s.block(s.holes[0]), windows.ask(), windows.settings
    high = s.end_of(block)
    masks = bisect_left(s.holes, high)
    for low, end in windows.next_runs(block):
        first = asked.run(s.canvas, low, end, column=low, below=s.length)
        if low < high <= end:
            asked.read(first, s.holes[:masks], best=quota(masks), draw=s.revealed * windows.fresh)
    answer = yield asked.ask()
    return asked.picks(answer, asked.sure(s, settings, answer))[0][0]


def first_confidence(s: Canvas, settings: MaskedSettings, shift: int) -> Decoding:
    """Answers a probe: the mean probability of the best tokens of the masks at Request.scored, in one forward; its logarithm. The
    request's temperature is 0. Source: CAL (actors/rows/lengths.py)."""
    asked = Windows(s, settings, shift).ask()
    assert s.request.scored is not None, "a probe names the masks that it asks about"
    asked.read(asked.run(s.canvas, 0, s.length, column=0, below=s.length), s.request.scored.tolist(), best=1, draw=0)
    answer = yield asked.ask()
    s.logprob = math.log(max(float(np.exp(answer.log_ps[0]).mean()), 1e-300))


def equal_steps(s: Canvas, tokens: int) -> Quota:
    return lambda masks: min(masks, tokens)


def equal_shares(s: Canvas, steps: int) -> Quota:
    """Every block takes its share of the steps and reveals equally many in each; the first steps take the remainder."""
    share = max(steps // len({s.block(position) for position in s.holes}), 1)
    left: list[int] = []

    def quota(masks: int) -> int:
        if not left:
            # A new block.
            each, more = divmod(masks, share)
            left[:] = [each + (step < more) for step in range(share) if each or step < more]
        count = min(left.pop(0), masks)
        if count == masks:
            left.clear()
        return count

    return quota


def dream_quota(s: Canvas, steps: int) -> Quota:
    """As many as the linear time schedule of Dream's training gives; all that remain in the last step. With as many steps as
    masks, the first step reveals no token and the last one two."""
    times = dream_times(steps)

    def quota(masks: int) -> int:
        step = s.iterations
        if step >= steps - 1:
            return masks
        return int(np.float32(masks) * (np.float32(1.0) - times[step + 1] / times[step]))

    return quota


def dream_times(steps: int) -> Any:
    """float32 [steps + 1], from 1 down to nearly 0: torch.linspace to the bit, which counts from both ends and rounds once."""
    index, last = np.arange(steps + 1), np.float32(_LAST_TIME)
    step = np.float64((last - np.float32(1.0)) / np.float32(steps))
    times = np.where(index < (steps + 1) // 2, 1.0 + step * index, np.float64(last) - step * (steps - index))
    return times.astype(np.float32)


def above(tau: float, sure: list[float]) -> int:
    return max(sum(confidence >= tau for confidence in sure), 1)


def within(factor: float, sure: list[float]) -> int:
    return max((n for n, confidence in enumerate(sure, 1) if (n + 1) * (1.0 - confidence) < factor), default=1)


def algorithm(setup: Setup, settings: StepwiseSettings) -> Algorithm:
    quota_of: Callable[[Canvas], Quota] = partial(equal_steps, tokens=settings.tokens_per_step)
    if settings.steps is not None:
        quota_of = partial(dream_quota if settings.schedule == "dream" else equal_shares, steps=settings.steps)
    decode = partial(stepwise, settings=settings, shift=setup.info.shift, quota_of=quota_of)
    return algorithm_of(decode, setup, settings, knows_logprob=settings.steps is None and settings.tokens_per_step == 1)


def threshold(setup: Setup, settings: ThresholdSettings) -> Algorithm:
    decode = partial(stepwise, settings=settings, shift=setup.info.shift, count=partial(above, settings.tau))
    return algorithm_of(decode, setup, settings, knows_logprob=False)


def factor(setup: Setup, settings: FactorSettings) -> Algorithm:
    decode = partial(stepwise, settings=settings, shift=setup.info.shift, count=partial(within, settings.factor))
    return algorithm_of(decode, setup, settings, knows_logprob=False)


def algorithm_of(
    decode: Callable[..., Decoding], setup: Setup, settings: MaskedSettings, *, knows_logprob: bool
) -> Algorithm:
    """What decoders of masked diffusion share. Dream's code takes its confidences from the distribution that it draws from,
    LLaDA's from the model's own."""
    notes: tuple[Note, ...] = () if settings.confidence == "random" else (settings.confidence,)
    cached = settings.cache != "none"
    return Algorithm(
        decode=decode,
        kind="masked",
        sample=partial(Canvas, block_length=settings.block_length),
        has_prompt=no_prompt,
        keeps=cached,
        num_slots=2 if settings.guidance_scale else 1,
        guidance=settings.guidance_scale,
        nodes=cached,
        probe=partial(first_confidence, settings=settings, shift=setup.info.shift),
        notes=notes,
        warped=setup.info.family == "dream",
        fresh=settings.draws_anew,
        knows_logprob=knows_logprob,
    )
