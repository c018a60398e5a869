"""`parallel`: all holes in one forward, each drawn from its distribution given the prompt alone; fast and lossy.

    query of any hole    sees the prompt, and no other hole

The log-probability of the result is unknown: holes do not see each other. Source: ASSD (Guo and Ermon), on parallel sampling.
"""

from __future__ import annotations

from draftmill.decoders.any_subset.sequential import whole_prompt
from draftmill.decoders.any_subset.settings import ParallelSettings
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import NO_DRAFT, TARGET_ONCE, Decoding
from draftmill.decoders.engine.samples import Sample, equal_queries
from draftmill.decoders.engine.setup import Setup


def parallel(s: Sample) -> Decoding:
    """One forward."""
    n, count = s.decided, s.length - s.decided
    _, tokens, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), TARGET_ONCE, [NO_DRAFT] * count)
    s.commit(tokens, log_ps, count)


def algorithm(setup: Setup, settings: ParallelSettings) -> Algorithm:
    """How the engine runs it; settings do not matter."""
    return Algorithm(
        decode=parallel,
        kind="any_subset",
        joins_prompts=False,
        knows_logprob=False,
        reusable=whole_prompt,
        cut_multiple=WHOLE,
    )
