"""`autoregressive`: one token per forward, the baseline that every lossless decoder of causal models must equal; and the scorer.

A score takes one forward: nothing is generated.

column      0 .. from-2 | from-1 .. length-2 | length-1
its row     not asked   | scores column + 1  | not run
holds       given       | given              | the last scored token
"""

from __future__ import annotations

from draftmill.decoders.causal.settings import AutoregressiveSettings, SpeculativeSettings
from draftmill.decoders.common_settings import Estimate
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import JUST_ONE, SCORE, TARGET, Decoding
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


def autoregressive(s: Sample) -> Decoding:
    """The first forward runs the prompt and gives the first token; NFE equals the number of generated tokens."""
    while s.decided < s.length:
        _, tokens, log_ps, _ = yield s.causal(s.decided, 1, TARGET, JUST_ONE)
        s.cached = s.decided
        s.commit(tokens, log_ps, 1)


def score(s: Sample) -> Decoding:
    """Score the end of a text, of which at least the first token is given."""
    scored = s.tokens[s.prompt :]
    first_choices, _, log_ps, _ = yield s.causal(s.length - 1, len(scored), SCORE, scored)
    s.grade(log_ps, first_choices)


def algorithm(setup: Setup, settings: AutoregressiveSettings | SpeculativeSettings) -> Algorithm:
    return Algorithm(decode=autoregressive, follows=Sample.causal_next)


def scorer(setup: Setup, settings: AutoregressiveSettings, estimate: Estimate) -> Algorithm:
    """How the engine scores: exactly, whatever the `settings` and the `estimate`."""
    return Algorithm(decode=score, scores=True)
