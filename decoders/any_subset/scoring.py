"""The exact joint log-probability of any tokens of a text given all its others under an any-subset model, in one forward.

This is the density pass of ASSD, which verifies drafts with it: the content rows hold the text in decoding order, the given
tokens first, and the query at the rank of each scored token sees the columns before that rank.

    rank            0 .. prompt-1 | prompt .. length-2   | length-1
    content row     sees prompt   | sees itself and less | not run: nothing follows it
    query row       none          | sees the ranks before| sees the ranks before

The product of these conditionals is the joint: the order is the one in which every decoder of this room fills the same holes.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), on density estimation.
"""

from __future__ import annotations

from draftmill.decoders.any_subset.sequential import whole_prompt
from draftmill.decoders.any_subset.settings import AnySubsetSettings
from draftmill.decoders.common_settings import Estimate
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import SCORE, Decoding
from draftmill.decoders.engine.samples import Sample, fresh_queries
from draftmill.decoders.engine.setup import Setup


def score(s: Sample) -> Decoding:
    """Score tokens at any positions, given all the others."""
    scored = s.tokens[s.prompt :]
    first_choices, _, log_ps, _ = yield s.two_stream(s.length - 1, fresh_queries(s.prompt, len(scored)), SCORE, scored)
    s.grade(log_ps, first_choices)


def algorithm(setup: Setup, settings: AnySubsetSettings, estimate: Estimate) -> Algorithm:
    """How the engine runs it: these models' scores are exact, and depend neither on `settings` nor on `estimate`."""
    return Algorithm(decode=score, kind="any_subset", scores=True, reusable=whole_prompt, cut_multiple=WHOLE)
