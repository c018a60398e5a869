"""`any_subset`: one token a forward, in decoding order; the baseline that the speculative decoders must equal.

    columns (ranks)    0 1 2 | 3 4 5 6        m = 3 prompt tokens, n = 5 decided
    content of rank 4  x x x | x x . .        the last decided token: its keys and values are written
    query of rank 5    x x x | x x . .        a row without a token, which predicts the next one from all that is decided

NFE equals the number of holes. Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel
sampling" (ASSD), the sequential sampler of their section on decoding.
"""

from __future__ import annotations

from draftmill.decoders.any_subset.settings import AnySubsetSettings
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import JUST_ONE, TARGET, Decoding
from draftmill.decoders.engine.samples import Sample, fresh_queries
from draftmill.decoders.engine.setup import Setup


def any_subset(s: Sample) -> Decoding:
    """The first forward also runs the prompt."""
    while s.decided < s.length:
        n = s.decided
        _, tokens, log_ps, _ = yield s.two_stream(n, fresh_queries(n, 1), TARGET, JUST_ONE)
        s.commit(tokens, log_ps, 1)


def algorithm(setup: Setup, settings: AnySubsetSettings) -> Algorithm:
    """How the engine runs it; settings do not matter."""
    return Algorithm(
        decode=any_subset,
        kind="any_subset",
        joins_prompts=False,
        reusable=whole_prompt,
        cut_multiple=WHOLE,
    )


def whole_prompt(s: Sample) -> int:
    """The columns of a prompt that another sample can take over: all, since holes are predicted by rows of their own."""
    return s.prompt
