"""`assd`: draft k tokens from the model's own marginals or from an n-gram, then verify them by their density in one forward.

An iteration takes both forwards (self drafter), or only the second (n-gram drafter). n tokens are decided, D are drafted:

    forward   content rows           query rows                    gives
    draft     the last decided       ranks n .. n+D-1, sight n     drafts; at rank n the target's own token
    density   drafts but the last    ranks n+1 .. n+D-1, own rank  accepted drafts, then the token that replaces a refused one

The first self-draft comes from the row that would verify it, so it holds without a comparison of floats, and a window of one
needs no density forward. With a Markov head (decoders/backbones/heads.py) the drafts after the first are drawn one after the
other, each from its row corrected with the tokens before it. An n-gram drafts where the first hole has a left neighbour; all of
its drafts are verified, those at ranks n .. n+D-1.

`fused: rows` (`one_pass`): one forward verifies the drafts and proposes the next window. Acceptance is exact for any
proposal known when the draft is drawn, so the rows that propose may be stale: without the tokens that this forward decides.

    rows           rank          sight   for
    content        n-1 .. n+D-1  own     the last decided token and the drafts
    verification   n+a           n+a     a = 0..D; the last gives the bonus token
    stale (rows)   n+s+o         n+s     s in S, o >= 1: if the window ends at n+A, the next drafts come from the largest s <= A

S is 0..D with `rows: all`, {0, D} with `rows: ends`. A draft head corrects a stale row with what it has not seen. Every forward
decides at least one token, so NFE <= number of holes. This goes beyond the paper, whose iterations take two forwards. The
distribution is sequential by the argument of Leviathan et al. (2023).

With `drafter: {kind: run}` texts of earlier runs draft, and one forward verifies them as above.

`k: auto`: a window of one token, without drafts if fused, is an iteration of `any_subset`.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), Algorithms 1 and 2
(line 9 of the first means N - 1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from draftmill.decoders.any_subset.sequential import any_subset_model
from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.decoders.engine import asks
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Decoding, Roll, SampleFrom
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.earlier_texts import EarlierTexts, texts_by, way_of
from draftmill.decoders.engine.samples import Sample, equal_queries, fresh_queries
from draftmill.decoders.engine.setup import Setup

if TYPE_CHECKING:
    from draftmill.decoders.fastest import FastestSettings

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""

Length = Callable[[], int]
"""How many tokens the next window may have."""
Drafting = Generator[Any, Any, tuple[list[int], list[float]]]
"""Returns the drafts, and the log-probabilities of those that are accepted without a test: the first one or none."""


def assd(s: Sample, length: Length, *, ngram: bool, head: int, auto: bool) -> Decoding:
    """Draft, verify, commit. With `auto` a length of one is plain decoding: the n-gram drafts nothing."""
    ngrams = Ngrams(s) if ngram else None
    while s.decided < s.length:
        most = length()
        yield from window(s, most, None if auto and most == 1 else ngrams, head)


def window(s: Sample, most: int, ngrams: Ngrams | None, head: int) -> Decoding:
    n = s.decided
    size = min(most, s.length - n)
    if ngrams and s.order and s.order[n] > 0:
        drafts, log_ps = yield from by_ngram(s, ngrams, size)
    else:
        drafts, log_ps = yield from by_marginals(s, size, head)
    sure, count = len(log_ps), len(drafts)
    s.tokens[n : n + count] = drafts
    accepted, tokens = sure, drafts[:sure]
    if sure < count:
        # No query of this window sees the content of the last draft.
        checks = fresh_queries(n + sure, count - sure)
        good, judged, judged_log_ps, _ = yield s.two_stream(n + count - 1, checks, asks.JUDGE, drafts[sure:])
        accepted, tokens, log_ps = sure + good, tokens + judged, log_ps + judged_log_ps
        s.cached = n + min(accepted, count - 1)
    s.commit(tokens, log_ps, min(accepted + 1, count), drafts, accepted)


def by_earlier_texts(s: Sample, texts_of: Callable[[Sample], EarlierTexts]) -> Decoding:
    texts = texts_of(s)
    while s.decided < s.length:
        yield from by_texts(s, texts)
    texts.count()


def by_texts(s: Sample, texts: EarlierTexts) -> Decoding:
    """One forward verifies what texts draft, and gives the token after the drafts that hold."""
    n = s.decided
    drafts = texts.drafts(s.length - n - 1)
    end = n + len(drafts)
    s.tokens[n:end] = drafts
    judged = [*drafts, asks.NO_DRAFT]
    accepted, tokens, log_ps, _ = yield s.two_stream(end, fresh_queries(n, len(judged)), asks.SURE, judged)
    s.cached = n + accepted
    s.commit(tokens, log_ps, accepted + 1, drafts, accepted)


def by_marginals(s: Sample, count: int, head: int) -> Drafting:
    """Algorithm 1: the model's own marginals, given what is decided."""
    n = s.decided
    if head == asks.INDEPENDENT or count == 1:
        _, drafts, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), asks.DRAFT, [asks.NO_DRAFT] * count)
        return drafts, log_ps[:1]
    _, first, log_ps, _ = yield s.two_stream(n, equal_queries(n, count, n), asks.DRAFT, asks.JUST_ONE)
    s.tokens[n] = first[0]
    _, later, _, _ = yield Roll(head, n + 1, count - 1, row=1, limit=n)
    return first + later, log_ps


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


class Ngrams:
    """The context n-gram of Algorithm 2: what followed the left neighbour elsewhere on the canvas of a sample, and how often.

        canvas    a  b  _  a  c  _  a  _ _      the hole after the last a: b and c, once each; the next one waits for that draft
        without a pair: how often each token occurs; on a canvas without tokens all are alike

    Only decided tokens are counted, drafted ones never. The paper's Eq. 23 divides by the count of the left token, which includes
    occurrences at the end or before a hole; counting pairs alone makes the distribution sum to one.
    """

    def __init__(self, s: Sample) -> None:
        assert s.order is not None, "an any-subset canvas has an order"
        self._s, self._order, self._known = s, s.order, 0
        self._singles = Counter[int]()
        self._pairs = defaultdict[int, Counter[int]](Counter)

    def after(self, position: int, drafted: int) -> Counter[int]:
        """The counts for the hole at `position`, whose left neighbour may be one of the ranks below `drafted`."""
        s = self._s
        for rank in range(self._known, s.decided):
            token, place = s.tokens[rank], self._order[rank]
            self._singles[token] += 1
            left, right = (s.rank_at.get(beside, rank) for beside in (place - 1, place + 1))
            if left < rank:
                self._pairs[s.tokens[left]][token] += 1
            if right < rank:
                self._pairs[token][s.tokens[right]] += 1
        self._known = s.decided
        rank = s.rank_at.get(position - 1, drafted)
        pairs = self._pairs.get(s.tokens[rank]) if rank < drafted else None
        return pairs or self._singles


def one_pass(s: Sample, length: Length, *, head: int, ends: bool) -> Decoding:
    drafts = list[int]()
    while s.decided < s.length:
        drafts = yield from fused(s, drafts, length(), head, ends=ends)


def fused(s: Sample, drafts: list[int], most: int, head: int, *, ends: bool) -> Generator[Any, Any, list[int]]:
    """Verify, commit the drafts that hold and the token after them, draft the next window from the same forward."""
    n, depth = s.decided, len(drafts)
    # This forward decides at least one token; the next window can hold the remaining ones.
    reach = min(most, s.length - n - 1)
    cuts = stale_rows(depth, reach, ends=ends)
    # After the last rank of the canvas there is no row for a bonus.
    num_checks = min(depth + 1, s.length - n)
    queries: Sequence[int] = fresh_queries(n, num_checks)
    first_row = dict[int, int]()
    row = num_checks
    for cut, count in cuts:
        inside = min(count, s.length - n - cut - 1)
        if inside > 0:
            queries = (*queries, *equal_queries(n + cut + 1, inside, n + cut))
            first_row[cut], row = row, row + inside
    judged = [*drafts, asks.NO_DRAFT][:num_checks]
    accepted, tokens, log_ps, _ = yield s.two_stream(n + depth, queries, asks.JUDGE, judged)
    s.commit(tokens, log_ps, min(accepted + 1, num_checks), drafts, accepted)
    s.cached = n + accepted
    if not (count := min(reach, s.length - s.decided)):
        return []
    cut = 0 if ends and accepted < depth else accepted
    _, new, _, _ = yield Roll(head, s.decided, count, row=first_row[cut] + accepted - cut, limit=n + cut)
    s.tokens[s.decided : s.decided + count] = new
    return list(new)


def stale_rows(depth: int, reach: int, *, ends: bool) -> list[tuple[int, int]]:
    """For each s of S how many rows come after its rank; with `ends`, s = 0 serves every window that ends early."""
    if not reach:
        return []
    if not ends:
        return [(cut, reach) for cut in range(depth + 1)]
    return [(0, reach + max(depth - 1, 0)), *([(depth, reach)] if depth else [])]


def algorithm(setup: Setup, settings: AssdSettings) -> Algorithm:
    if isinstance(settings.drafter, RunDrafterSettings):
        texts_of, most, auto = texts_by(settings.drafter)
        decode = partial(by_earlier_texts, texts_of=texts_of)
        return any_subset_model(decode=decode, window=most + 1, auto=auto)
    ngram, ends, is_fused = settings.drafter == "ngram", settings.rows == "ends", settings.fused == "rows"
    k, auto = settings.k, None
    if k == "auto":
        k, auto = MOST_AUTO, AutoLength(Way(MOST_AUTO, least=int(not is_fused), shares_cost=not is_fused))
    length = auto or (lambda: k)
    head = asks.INDEPENDENT if ngram or setup.heads is None else asks.MARKOV
    decode = partial(one_pass, length=length, head=head, ends=ends)
    if not is_fused:
        decode = partial(assd, length=length, ngram=ngram, head=head, auto=auto is not None)
    return any_subset_model(decode=decode, window=k + is_fused, auto=auto, keeps_laws=True, names_laws=ngram)


_ROWS, _ENDS, _SELF, _NGRAM, _TEXTS = range(5)
_WAYS: Final = (
    Way(4, name="rows"),
    Way(8, name="ends"),
    Way(MOST_AUTO, least=1, shares_cost=True, name="self"),
    Way(8, name="ngram"),
)


def by_clock(s: Sample, auto: AutoLength, head: int, texts_of: Callable[[Sample], EarlierTexts] | None) -> Decoding:
    """Each iteration in the way that the clock says; texts of earlier runs come first. Fused drafts that are left from the one
    before are verified first."""
    ngrams, texts = Ngrams(s), texts_of(s) if texts_of else None
    kinds = (_ROWS, _ENDS, _SELF, _NGRAM) if texts is None else (_TEXTS, _ROWS, _ENDS, _SELF, _NGRAM)
    drafts = list[int]()
    while s.decided < s.length:
        most, way = auto(), kinds[auto.way]
        if drafts or not most or way in {_ROWS, _ENDS}:
            drafts = yield from fused(s, drafts, most if way in {_ROWS, _ENDS} else 0, head, ends=way == _ENDS)
        elif way == _TEXTS and texts is not None:
            yield from by_texts(s, texts)
            texts.count()
        else:
            yield from window(s, most, ngrams if way == _NGRAM else None, head)


def fastest(setup: Setup, settings: FastestSettings) -> Algorithm:
    """How the engine runs `fastest`: all of the above may draft, and texts of earlier runs if the settings name them."""
    auto, texts_of, most = AutoLength(*_WAYS), None, MOST_AUTO
    if isinstance(settings.drafter, RunDrafterSettings):
        auto = AutoLength(way_of(settings.drafter), *_WAYS)
        texts_of, most, _ = texts_by(settings.drafter, auto)
    head = asks.INDEPENDENT if setup.heads is None else asks.MARKOV
    return any_subset_model(
        decode=partial(by_clock, auto=auto, head=head, texts_of=texts_of),
        window=max(most, MOST_AUTO) + 1,
        auto=auto,
        keeps_laws=True,
        names_laws=True,
        follows=Sample.two_stream_next,
    )
