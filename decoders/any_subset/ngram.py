"""The context n-gram of ASSD's Algorithm 2: what followed the left neighbour elsewhere on the canvas, and how often.

    canvas    a  b  _  a  c  _  a  _ _      the hole after the last a: b and c, once each; the one after it waits for that draft
    without a pair: how often each token occurs; on a canvas without tokens all are alike

Only decided tokens are counted, drafted ones never. The paper's Eq. 23 divides by the count of the left token, which includes
occurrences at the end or before a hole; counting pairs alone makes the distribution sum to one.

Source: Guo and Ermon, ASSD, Algorithm 2.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from draftmill.decoders.engine.samples import Sample


class Ngrams:
    """The counts of one sample, which grow with its decided tokens."""

    def __init__(self, s: Sample) -> None:
        assert s.order is not None, "an any-subset canvas has an order"
        self._s, self._order, self._known = s, s.order, 0
        self._singles = Counter[int]()
        self._pairs = defaultdict[int, Counter[int]](Counter)

    def after(self, position: int, drafted: int) -> Counter[int]:
        """The counts for the hole at `position`, whose left neighbour may be one of the ranks below `drafted`."""
        self._count_decided()
        rank = self._s.rank_at.get(position - 1, drafted)
        pairs = self._pairs.get(self._s.tokens[rank]) if rank < drafted else None
        return pairs or self._singles

    def _count_decided(self) -> None:
        s = self._s
        for rank in range(self._known, s.decided):
            token, position = s.tokens[rank], self._order[rank]
            self._singles[token] += 1
            left, right = (s.rank_at.get(place, rank) for place in (position - 1, position + 1))
            if left < rank:
                self._pairs[s.tokens[left]][token] += 1
            if right < rank:
                self._pairs[token][s.tokens[right]] += 1
        self._known = s.decided
