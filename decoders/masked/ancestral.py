"""`ancestral`: masked diffusion backwards in time (MDLM, SEDD); each step reveals masks at random.

    time      t_0 = that of the canvas's own share of masks .. t_1 .. t_2 ..    t_steps = 1e-5 | the rest at once
    masks     each is revealed with the predictor's chance in every step, with a token drawn from its logits

    ddpm      (MDLM) the chance is (t - s) / t, whatever the model says
    analytic  (SEDD) the chance is the sum of the scores, over a step of the noise
    euler     (SEDD) the same, to first order in the time

A mask draws one uniform number a step, and its token with the noise of its position, so a sample is a function of its key.
With ddpm a sample takes one forward for each step that reveals something, the last one included; with scores one a step.

Differs from the public samplers on purpose: a canvas with a prompt starts at its own share of masks instead of at time 1; the
last masks are drawn like all others instead of by an argmax (MDLM); float32 exponential races, which lower the temperature, are
replaced by the noise field; temperature, top-k and top-p warp the token's distribution, never the chance of being revealed.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), section 3.2; Lou et al., "Discrete
Diffusion Modeling by Estimating the Ratios of the Data Distribution" (2024), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.draws import keys
from draftmill.decoders.draws.schedule import LAST_TIME, log_scale, noise_rate, time_at, total_noise
from draftmill.decoders.engine.algorithm import Algorithm, no_prompt
from draftmill.decoders.engine.asks import Answer, Ask, Decoding
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.canvas import Canvas, CanvasAsk, Pick
from draftmill.decoders.masked.settings import AncestralSettings

Floats = NDArray[np.float64]


def by_time(s: Canvas, steps: int, shift: int) -> Decoding:
    """Each mask has its step from the start: the chances (t - s) / t make its time uniform between 0 and t_0."""
    time_of, first = times(s, steps), first_time(s)
    uniform = keys.uniforms(s.key, np.array(s.holes, dtype=np.int64), keys.ORDER)
    step_of = ((1.0 - uniform) * first / (first - LAST_TIME) * steps).astype(np.int64).clip(max=steps)
    masks_at: dict[int, list[int]] = {}
    for position, step in zip(s.holes, step_of.tolist(), strict=True):
        masks_at.setdefault(step, []).append(position)
    left = iter(sorted(masks_at))
    while s.holes:
        step = next(left, steps)
        masks = masks_at.pop(step, s.holes)  # after all steps those whose tokens a constraint refused beside others
        answer = yield ask_about(s, masks, time_of(step), shift)
        s.reveal(picks_of(answer, masks))


def by_scores(s: Canvas, steps: int, shift: int, vocab_size: int, *, euler: bool) -> Decoding:
    """The scores of the canvas say how likely each mask is revealed in this step; after the last step all are."""
    time_of, step = times(s, steps), 0
    while s.holes:
        masks, time, later = s.holes, time_of(step), time_of(step + 1)
        answer = yield ask_about(s, masks, time, shift)
        total_R = np.exp(answer.notes[0][0] - log_scale(total_noise(time), vocab_size))
        struck_R = strikes(s, masks, chances(total_R, time, later, euler=euler), step)
        pairs = zip(picks_of(answer, masks), struck_R, strict=True)
        s.reveal([pick for pick, struck in pairs if struck or step >= steps])
        step += 1


def chances(total_R: Floats, time: float, later: float, *, euler: bool) -> Floats:
    """How likely each mask of `time` is revealed until `later`: as much as its scores sum to, [R], at most 1. The analytic
    predictor scales the scores by e^(sigma - sigma') - 1, Euler's by the time between them and the noise's rate. Scores that
    are too large would leave the mask a negative probability; then it is revealed."""
    scale = (time - later) * noise_rate(time) if euler else math.expm1(total_noise(time) - total_noise(later))
    return np.minimum(scale * total_R, 1.0)


def strikes(s: Canvas, masks: list[int], chance_R: Floats, step: int) -> NDArray[np.bool_]:
    """Which masks are revealed: those whose uniform number of the position and the step is below the chance, [R]."""
    return keys.uniforms(s.key, np.array(masks, dtype=np.int64), keys.ORDER, step) < chance_R


def ask_about(s: Canvas, masks: list[int], time: float, shift: int) -> Ask:
    asked = CanvasAsk(shift)
    first = asked.run(s.canvas, 0, s.length, column=0, below=s.length)
    asked.read(first, masks, best=len(masks), draw=0)
    return asked.ask(sigmas=(total_noise(time),))


def picks_of(answer: Answer, masks: list[int]) -> list[Pick]:
    tokens, log_ps = answer.tokens[0].tolist(), answer.log_ps[0].tolist()
    return [(0.0, *pick) for pick in zip(masks, tokens, log_ps, strict=True)]


def first_time(s: Canvas) -> float:
    """The time at which the expected number of masks equals the canvas's."""
    return max(time_at(len(s.holes) / s.length), 2 * LAST_TIME)


def times(s: Canvas, steps: int) -> Callable[[int], float]:
    """The start time of each step; the last step starts at the end time of the others."""
    first = first_time(s)
    return lambda step: first + (LAST_TIME - first) * min(step, steps) / steps


def algorithm(setup: Setup, settings: AncestralSettings) -> Algorithm:
    predictor = settings.predictor_for(setup.info.family)
    by_model = predictor != "ddpm"
    decode: Callable[[Canvas], Decoding] = partial(by_time, steps=settings.steps, shift=setup.info.shift)
    if by_model:
        vocab_size, euler = setup.info.vocab_size, predictor == "euler"
        decode = partial(by_scores, steps=settings.steps, shift=setup.info.shift, vocab_size=vocab_size, euler=euler)
    return Algorithm(
        decode=decode,
        kind="masked",
        sample=partial(Canvas, block_length=None),
        has_prompt=no_prompt,
        keeps=False,
        notes=("scores",) if by_model else (),
        knows_logprob=False,
    )
