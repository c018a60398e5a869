"""`assd`: draft k tokens from the model's own marginals or from an n-gram, then verify them by their density in one forward.

An iteration is a draft forward and a density forward (self drafter), or a density forward alone (n-gram drafter). n tokens are
decided, D are drafted:

    forward   content rows           query rows                    gives
    draft     the last decided       ranks n .. n+D-1, sight n     drafts; at rank n the target's own token
    density   drafts but the last    ranks n+1 .. n+D-1, own rank  accepted drafts, then the token that replaces a refused one

The first self-draft comes from the row that would verify it, so it holds without a comparison of floats, and a window of one
needs no density forward. With a Markov head (decoders/backbones/heads.py) the drafts after the first are drawn one after the
other, each from its row corrected with the tokens before it. An n-gram drafts where the first hole has a left neighbour; all of
its drafts are verified, those at ranks n .. n+D-1.

`k: auto`: the budget gives each iteration the drafts after its first one.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), Algorithms 1 and 2
(line 9 of the first means N - 1).
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, Final

from draftmill.decoders.any_subset import one_pass
from draftmill.decoders.any_subset.ngram import Ngrams
from draftmill.decoders.any_subset.sequential import whole_prompt
from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import (
    DRAFT,
    INDEPENDENT,
    JUDGE,
    JUST_ONE,
    MARKOV,
    NO_DRAFT,
    SEARCH,
    Decoding,
    Offer,
    Roll,
    SampleFrom,
)
from draftmill.decoders.engine.samples import Sample, equal_queries, fresh_queries
from draftmill.decoders.engine.setup import Setup

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""

Drafting = Generator[Any, Any, tuple[list[int], list[float]]]
"""Returns the drafts, and the log-probabilities of those that hold for sure: the first one or none."""


def assd(s: Sample, k: int, *, ngram: bool, head: int, auto: bool) -> Decoding:
    """Draft, verify, commit. With `auto` a budget gives the drafts after the first, or none is looked for."""
    ngrams = Ngrams(s) if ngram else None
    while s.decided < s.length:
        n, more, searches = s.decided, min(k, s.length - s.decided) - 1, True
        if auto:
            searches = yield SEARCH
            more = (yield Offer(more)) if searches else 0
        if ngrams and searches and s.order and s.order[n] > 0:
            drafts, log_ps = yield from by_ngram(s, ngrams, more + 1)
        else:
            drafts, log_ps = yield from by_marginals(s, more + 1, head)
        sure, count = len(log_ps), len(drafts)
        s.tokens[n : n + count] = drafts
        accepted, tokens = sure, drafts[:sure]
        if sure < count:
            # No query of this window sees the content of the last draft.
            checks = fresh_queries(n + sure, count - sure)
            good, judged, judged_log_ps, _ = yield s.two_stream(n + count - 1, checks, JUDGE, drafts[sure:])
            accepted, tokens, log_ps = sure + good, tokens + judged, log_ps + judged_log_ps
            s.cached = n + min(accepted, count - 1)
        kept = s.commit(tokens, log_ps, min(accepted + 1, count), drafts, accepted)
        # The first token of an iteration costs what a sequential one does; the others are the gain of drafting.
        s.just = count - 1, kept - 1


def by_marginals(s: Sample, count: int, head: int) -> Drafting:
    """Algorithm 1: the model's own marginals, given what is decided."""
    n = s.decided
    if head == INDEPENDENT or count == 1:
        _, drafts, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), DRAFT, [NO_DRAFT] * count)
        return drafts, log_ps[:1]
    _, first, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), DRAFT, JUST_ONE)
    s.tokens[n] = first[0]
    _, others, _, _ = yield Roll(head, n + 1, count - 1, row=1, limit=n)
    return first + others, log_ps


def by_ngram(s: Sample, ngrams: Ngrams, count: int) -> Drafting:
    """Algorithm 2: the n-gram of the canvas. A draft is no forward, but is counted as one of the drafter's."""
    n = s.decided
    assert s.order is not None, "an any-subset canvas has an order"
    for rank in range(n, n + count):
        counts = ngrams.after(s.order[rank], rank)
        _, tokens, _, _ = yield SampleFrom(rank, list(counts), list(counts.values()))
        s.tokens[rank] = tokens[0]
    s.nfe_draft += count
    return s.tokens[n : n + count], []


def algorithm(setup: Setup, settings: AssdSettings) -> Algorithm:
    """How the engine runs these settings."""
    if settings.fused != "none":
        return one_pass.algorithm(setup, settings, MOST_AUTO)
    is_auto, ngram = settings.k == "auto", settings.drafter == "ngram"
    k = MOST_AUTO if settings.k == "auto" else settings.k
    head = INDEPENDENT if ngram or setup.heads is None else MARKOV
    # Content and query rows of an iteration with e drafts after its first, and its forwards.
    rows = [2 * e + 2 if ngram else 3 * e + 2 for e in range(k)]
    forwards = [1 if ngram or e == 0 else 2 for e in range(k)]
    return Algorithm(
        decode=partial(assd, k=k, ngram=ngram, head=head, auto=is_auto),
        kind="any_subset",
        window=k,
        most_auto=(k - 1) * is_auto,
        auto_rows=rows,
        auto_forwards=forwards,
        keeps_laws=True,
        names_laws=ngram,
        joins_prompts=False,
        reusable=whole_prompt,
        cut_multiple=WHOLE,
    )
