"""`ancestral`: masked diffusion backwards in time (MDLM, SEDD); each step reveals masks at random.

    time      t_0 = that of the canvas's own share of masks .. t_1 .. t_2 ..    t_steps = 1e-5 | the rest at once
    masks     each is revealed with the predictor's chance in every step, with a token drawn from its logits

    ddpm      (MDLM) the chance is (t - s) / t, whatever the model says
    analytic  (SEDD) the chance is the sum of the scores, over a step of the noise
    euler     (SEDD) the same, to first order in the time

A mask draws one uniform number a step, and its token with the noise of its position, so a sample is a function of its key.
With ddpm the chance does not depend on the model. A step that reveals nothing needs no forward, so a sample takes one forward
for each step that reveals something, the last one included. With scores each step takes one.

Differs from the public samplers on purpose: a canvas with a prompt starts at its own share of masks instead of at time 1; the
last masks are drawn like all others instead of by an argmax (MDLM); float32 exponential races, which lower the temperature, are
replaced by the noise field; temperature, top-k and top-p warp the token's distribution, never the chance of being revealed.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), section 3.2; Lou et al., "Discrete
Diffusion Modeling by Estimating the Ratios of the Data Distribution" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from draftmill.decoders.draws import keys
from draftmill.decoders.draws.schedule import LAST_TIME, time_at
from draftmill.decoders.engine.algorithm import Algorithm, Canvases
from draftmill.decoders.engine.asks import Decoding
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.looks import NO_MORE, Look, LookRows
from draftmill.decoders.masked.settings import AncestralSettings
from draftmill.decoders.masked.stepwise import runs_no_prompt

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup


def by_time(s: Canvas, steps: int, shift: int) -> Decoding:
    """Each mask has its step from the start: the chances (t - s) / t make its time uniform between 0 and t_0."""
    time_of, first = times(s, steps), first_time(s)
    uniform = keys.uniforms(s.key, np.array(s.holes, dtype=np.int64), keys.ORDER)
    step_of = ((1.0 - uniform) * first / (first - LAST_TIME) * steps).astype(np.int64).clip(max=steps)
    masks_at: dict[int, list[int]] = {}
    for position, step in zip(s.holes, step_of.tolist(), strict=True):
        masks_at.setdefault(step, []).append(position)
    for step in sorted(masks_at):
        picks = yield look_at(s, masks_at[step], (time_of(step), time_of(step + 1)), step, shift)
        s.reveal(picks)
        if not s.holes:
            return


def by_scores(s: Canvas, steps: int, shift: int) -> Decoding:
    """The scores of the canvas say how likely each mask is revealed in this step; after the last step all are."""
    time_of, step = times(s, steps), 0
    while s.holes:
        picks = yield look_at(s, s.holes, (time_of(step), time_of(step + 1)), step, shift)
        struck = [pick for pick in picks if pick[0] < 0.0 or step >= steps]
        s.reveal(sorted(struck, key=lambda pick: pick[1]))
        step += 1


def look_at(s: Canvas, masks: list[int], times: tuple[float, float], step: int, shift: int) -> Look:
    """Run the canvas, and ask about these masks."""
    rows = LookRows(shift)
    first = rows.run(s.canvas, 0, s.length, column=0, node=0, sees=(0, s.length, *NO_MORE))
    rows.read(first, masks, best=len(masks), draw=step)
    return rows.look(times=times)


def first_time(s: Canvas) -> float:
    """The time at which as many masks are expected as the canvas has."""
    return max(time_at(len(s.holes) / s.length), 2 * LAST_TIME)


def times(s: Canvas, steps: int) -> Callable[[int], float]:
    """The start time of each step; the last step starts at the end time of the others."""
    first = first_time(s)
    return lambda step: first + (LAST_TIME - first) * min(step, steps) / steps


def algorithm(setup: Setup, settings: AncestralSettings) -> Algorithm:
    """How the engine runs these settings."""
    predictor = settings.predictor_for(setup.info.family)
    by_model = predictor != "ddpm"
    return Algorithm(
        decode=partial(by_scores if by_model else by_time, steps=settings.steps, shift=setup.info.shift),
        kind="masked",
        canvases=Canvases(confidence=predictor if by_model else "unordered", conditioned=True),
        sample=partial(Canvas, block_length=None),
        has_prompt=runs_no_prompt,
        knows_logprob=False,
    )
