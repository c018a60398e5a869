"""`assd` with `drafter: suffix`: drafts what followed the left context of the next hole in any text of the worker.

    canvas    d  e  f  _ _ _  (  s  e  l  f  _ _        decided from left to right
    index     all given runs and decided texts of the worker's samples (decoders/drafts/suffix_index.py)
    drafts    what followed `d e f` elsewhere; a walk that has filled a hole goes on over the given tokens behind it

A draft has no alternative, so there is nothing to draw, and one forward verifies: content rows write the last decided token and
the drafts, and a query at each rank after them sees what stands before it.

    ranks      .. n-1 | n  n+1  n+2          n decided tokens, two drafts
    content       n-1   n  n+1
    queries             n  n+1  n+2          the target's own tokens: accepted drafts, and the token after them

Without drafts an iteration is one of `any_subset`. Sources: decoders/drafts/suffix_index.py; ASSD, Algorithm 1, lines 12 to 19
(verification).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from draftmill.decoders.any_subset.sequential import whole_prompt
from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.drafts.settings import SuffixDrafterSettings
from draftmill.decoders.drafts.suffix_index import Reader, SuffixIndex
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import NO_DRAFT, SEARCH, SURE, Decoding, Offer
from draftmill.decoders.engine.samples import Sample, fresh_queries

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""


def among_texts(s: Sample, k: int, index: SuffixIndex, *, auto: bool) -> Decoding:
    """Draft, verify, commit the drafts that hold and the token after them."""
    canvas = Reading(s, index)
    while s.decided < s.length:
        n, drafts = s.decided, list[int]()
        if not auto or (yield SEARCH):
            if (most := min(k, s.length - n - 1)) > 0:
                s.nfe_draft += 1
                drafts = canvas.drafts(most)
            if auto:
                drafts = drafts[: (yield Offer(len(drafts)))]
        count = len(drafts)
        s.tokens[n : n + count] = drafts
        queries = fresh_queries(n, count + 1, SURE)
        accepted, tokens, log_ps = yield s.two_stream(n + count, queries, [*drafts, NO_DRAFT])
        s.cached = n + accepted
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted)
    canvas.read(len(s.request.canvas))


class Reading:
    """Reads a canvas from left to right into the index, as far as it is decided, and drafts for its holes."""

    def __init__(self, s: Sample, index: SuffixIndex) -> None:
        assert s.order is not None, "an any-subset canvas has an order"
        self._s, self._order, self._reader = s, s.order, Reader(index)
        self._place = 0
        for run in given_runs(s.request.canvas.tolist()):
            Reader(index).read(run)

    def _known(self, position: int, decided: int) -> int | None:
        """The token at a position; None if it is a hole that is not decided yet."""
        rank = self._s.rank_at[position]
        return self._s.tokens[rank] if rank < decided else None

    def read(self, end: int) -> None:
        """Read on up to the position `end`; behind a hole that is open a new text begins."""
        for position in range(self._place, end):
            token = self._known(position, self._s.decided)
            if token is None:
                self._reader.begin()
            else:
                self._reader.read((token,))
        self._place = max(self._place, end)

    def drafts(self, most: int) -> list[int]:
        """Up to `most` drafts for the next holes, as long as each lies to the right of the last and all between them is known."""
        n, order = self._s.decided, self._order
        position = order[n]
        self.read(position)
        found = list[int]()
        if position != self._place:  # what is to its left was read long ago
            return found
        walk = self._reader.walk()
        for hole in order[n : n + most]:
            between = [self._known(place, n) for place in range(position, hole)]
            if hole < position or None in between:
                break
            for token in between:
                walk.take(token or 0)
            draft = walk.draft()
            if draft == NO_DRAFT:
                break
            found.append(draft)
            position = hole + 1
        return found


def given_runs(canvas: list[int]) -> list[list[int]]:
    """The runs of given tokens behind the first hole, which the canvas itself reaches last."""
    runs, is_open = list[list[int]](), False
    for before, token in zip([0, *canvas], canvas, strict=False):
        if token >= 0 and is_open:
            if before < 0:
                runs.append([])
            runs[-1].append(token)
        is_open = is_open or token < 0
    return runs


def algorithm(setup: Setup, settings: AssdSettings) -> Algorithm:
    """How the engine runs these settings."""
    assert isinstance(settings.drafter, SuffixDrafterSettings), "another drafter is another decoder's"
    is_auto = settings.k == "auto"
    k = MOST_AUTO if settings.k == "auto" else settings.k
    return Algorithm(
        decode=partial(among_texts, k=k, index=SuffixIndex(settings.drafter), auto=is_auto),
        kind="any_subset",
        window=k + 1,
        auto="drafts" if is_auto else None,
        most_auto=k,
        # Content and query rows of an iteration.
        auto_rows=[2 * e + 2 for e in range(k + 1)],
        joins_prompts=False,
        shared=whole_prompt,
        grain=WHOLE,
    )
