"""Scores texts under masked diffusion (LLaDA, Dream, MDLM, SEDD): a bound of the log-probability of any tokens given all others.

A canvas is the text with one random mask over its scored tokens (decoders/estimates.py). All rows see all of it, and each
masked token's probability is read from the row that predicts it. A network that is conditioned on the noise (SEDD) gets
that of the time at which the canvas's own share of masks is expected: early with few scored tokens, as no other is masked.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import DecoderChoice, Estimate
from draftmill.decoders.draws.schedule import noise_of_share
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import FAR, Span
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.estimates import Draw, Grouping, ScoredRows, Text, estimate_algorithm


def all_together(request: Request) -> Grouping:
    scored = request.to_score()
    return [scored], scored[:0], 1


def rows_of(s: Text, canvas: list[Draw], *, mask: int, shift: int) -> ScoredRows:
    """The whole text with one mask; a row predicts the token `shift` after its own."""
    (draw,) = canvas
    text = s.request.canvas.astype(np.int64)
    tokens = text.copy()
    tokens[draw.masked] = mask
    return ScoredRows(
        tokens,
        Span(s.length, 0, 0, s.length, FAR),
        np.maximum(draw.asked_R - shift, 0),
        text[draw.asked_R],
        (noise_of_share(draw.share * len(s.scored) / s.length),),
    )


def algorithm(setup: Setup, settings: DecoderChoice, estimate: Estimate) -> Algorithm:
    """How the engine runs it; the estimator `auto` is MDLM's for models that diffuse in continuous time, else LLaDA's."""
    assert setup.info.mask_id is not None, "families of this kind have a mask"
    rows = partial(rows_of, mask=setup.info.mask_id, shift=setup.info.shift)
    return estimate_algorithm(settings, estimate, rows, all_together, kind="masked")
