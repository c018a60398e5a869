"""Log-probabilities of given tokens under a causal model: one forward a sample, nothing is generated.

column      0 .. from-2 | from-1 .. length-2 | length-1
its row     not asked   | scores column + 1  | not run
holds       given       | given              | the last scored token
"""

from __future__ import annotations

from draftmill.decoders.causal.autoregressive import prompt_but_one
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Estimate
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import SCORE, Decoding
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


def score(s: Sample) -> Decoding:
    """Score the end of a text, of which at least the first token is given."""
    scored = s.tokens[s.prompt :]
    first_choices, _, log_ps, _ = yield s.causal(s.length - 1, len(scored), SCORE, scored)
    s.grade(log_ps, first_choices)


def algorithm(setup: Setup, settings: AutoregressiveSettings, estimate: Estimate) -> Algorithm:
    """How the engine runs it: a causal model's scores are exact, and depend neither on `settings` nor on `estimate`."""
    return Algorithm(decode=score, scores=True, reusable=prompt_but_one)
