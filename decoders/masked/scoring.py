"""Scores texts under masked diffusion (LLaDA, Dream, MDLM, SEDD): a bound of the log-probability of any tokens given all others.

A canvas is the text with one random mask over its scored tokens (engine/estimates.py, draws/score_masks.py). All rows of a canvas
see all of it, and each masked token's probability is read from the row that predicts it.

A network that is conditioned on the noise (SEDD) gets that of the time at which the canvas's own share of masks is expected: the
given tokens of a text are never masked, so with few scored tokens that is early.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import DecoderChoice, Estimate
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import GivenRows, wide_span
from draftmill.decoders.engine.estimates import Draw, Grouping, Text, estimate_score, kind_of
from draftmill.decoders.masked.stepwise import runs_no_prompt

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup


def all_together(request: Request) -> Grouping:
    """All scored tokens are one group."""
    scored = request.to_score()
    return Grouping([scored], scored[:0])


def rows_of(s: Text, canvas: list[Draw], *, mask: int, shift: int) -> GivenRows:
    """The whole text with one mask; a row predicts the token `shift` after its own."""
    (draw,) = canvas
    text = s.request.canvas.astype(np.int64)
    tokens = text.copy()
    tokens[draw.masked] = mask
    return GivenRows(
        tokens,
        wide_span(s.length, 0, 0, s.length),
        np.maximum(draw.asked_R - shift, 0),
        text[draw.asked_R],
        draw.share * len(s.scored) / s.length,
    )


def algorithm(setup: Setup, settings: DecoderChoice, estimate: Estimate) -> Algorithm:
    """How the engine runs it; the estimator `auto` is MDLM's for models that diffuse in continuous time, else LLaDA's."""
    info = setup.info
    if info.mask_id is None:
        raise ValueError(f"decoder.kind: models of family {info.family!r} have no mask to score with")
    return Algorithm(
        decode=partial(estimate_score, rows_of=partial(rows_of, mask=info.mask_id, shift=info.shift)),
        kind="masked",
        scores=True,
        estimates=True,
        sample=partial(Text, grouped=all_together, kind=kind_of(settings, estimate), samples=estimate.samples),
        has_prompt=runs_no_prompt,
    )
