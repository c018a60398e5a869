"""`autoregressive`: one token per forward, the baseline that every lossless decoder of causal models must equal."""

from __future__ import annotations

from draftmill.decoders.causal.settings import AutoregressiveSettings, SpeculativeSettings
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import JUST_ONE, TARGET, Decoding
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


def autoregressive(s: Sample) -> Decoding:
    """The first forward runs the prompt and gives the first token; NFE equals the number of generated tokens."""
    while s.decided < s.length:
        _, tokens, log_ps, _ = yield s.causal(s.decided, 1, TARGET, JUST_ONE)
        s.cached = s.decided
        s.commit(tokens, log_ps, 1)


def algorithm(setup: Setup, settings: AutoregressiveSettings | SpeculativeSettings) -> Algorithm:
    """How the engine runs it; settings do not matter."""
    return Algorithm(decode=autoregressive, reusable=prompt_but_one)


def prompt_but_one(s: Sample) -> int:
    """The columns of a prompt that another sample can take over: the row of its last token predicts the first hole."""
    return s.prompt - 1
