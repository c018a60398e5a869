"""Decoders of any-subset models that don't speculate, and their scorer; each forward is read as it is.

    columns (ranks)    0 1 2 | 3 4 5 6        m = 3 prompt tokens, n = 5 decided
    content of rank 4  x x x | x x . .        the last decided token: its keys and values are written
    query of rank 5    x x x | x x . .        a row without a token, which predicts the next one from all that is decided

`any_subset`: one token a forward, in decoding order; the baseline that the speculative decoders must equal. NFE equals the number
of holes. `parallel`: all holes in one forward, each of which sees the prompt and no other hole; fast and lossy, and the
log-probability of the result is unknown.

`score`: the exact joint log-probability of any tokens of a text given all its others, in one forward: the density pass with which
ASSD verifies drafts. The content rows hold the text in decoding order, the given tokens first:

    rank            0 .. prompt-1 | prompt .. length-2   | length-1
    content row     sees prompt   | sees itself and less | not run: nothing follows it
    query row       none          | sees the ranks before| sees the ranks before

The product of these conditionals is the joint: every decoder of this room fills the same holes in the same order.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), the sections on
decoding, parallel sampling and density estimation.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from draftmill.decoders.any_subset.settings import AnySubsetSettings, ParallelSettings
from draftmill.decoders.common_settings import Estimate
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import JUST_ONE, NO_DRAFT, SCORE, TARGET, TARGET_ONCE, Decoding
from draftmill.decoders.engine.samples import Sample, equal_queries, fresh_queries

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup


def any_subset(s: Sample) -> Decoding:
    """The first forward also runs the prompt."""
    while s.decided < s.length:
        n = s.decided
        _, tokens, log_ps, _ = yield s.two_stream(n, fresh_queries(n, 1), TARGET, JUST_ONE)
        s.commit(tokens, log_ps, 1)


def parallel(s: Sample) -> Decoding:
    """One forward; under a constraint the tokens up to the first that does not fit to those before it, and then once more."""
    while s.decided < s.length:
        n, count = s.decided, s.length - s.decided
        _, tokens, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), TARGET_ONCE, [NO_DRAFT] * count)
        if s.may_clash and s.order is not None:
            fitting = s.fitting(list(zip(s.order[n:], tokens, strict=True)))
            count = next((index for index, at in enumerate(fitting) if at != index), len(fitting))
        s.commit(tokens, log_ps, count)


def score(s: Sample) -> Decoding:
    scored = s.tokens[s.prompt :]
    first_choices, _, log_ps, _ = yield s.two_stream(s.length - 1, fresh_queries(s.prompt, len(scored)), SCORE, scored)
    s.grade(log_ps, first_choices)


def joint(s: Sample) -> Decoding:
    """Answers a probe: the joint log-probability of the tokens from Request.score_from on, given those before them."""
    scored = s.tokens[s.prompt :]
    _, _, log_ps, _ = yield s.two_stream(s.length - 1, fresh_queries(s.prompt, len(scored)), SCORE, scored)
    s.logprob = math.fsum(log_ps)


any_subset_model: Final = partial(
    # Holes are predicted by rows of their own: another sample can take over all columns of a prompt.
    Algorithm,
    kind="any_subset",
    joins_prompts=False,
    reusable=lambda sample: sample.prompt,
    cut_multiple=WHOLE,
    probe=joint,
)
"""An Algorithm, as far as all decoders of any-subset models share it."""


def any_subset_algorithm(setup: Setup, settings: AnySubsetSettings) -> Algorithm:
    return any_subset_model(decode=any_subset, follows=Sample.two_stream_next)


def parallel_algorithm(setup: Setup, settings: ParallelSettings) -> Algorithm:
    return any_subset_model(decode=parallel, knows_logprob=False)


def scorer(setup: Setup, settings: AnySubsetSettings, estimate: Estimate) -> Algorithm:
    """How the engine scores: exactly, whatever the `settings` and the `estimate`."""
    return any_subset_model(decode=score, scores=True, joins_prompts=True)
