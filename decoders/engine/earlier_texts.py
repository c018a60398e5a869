"""Earlier texts of a sample as its drafter: the texts that the same row has in finished runs, and its own text so far.

A row's noise is known before it is decoded, so the text under another checkpoint, template or temperature is often the same for
long stretches. Each earlier text has a pointer to the token that should come next:

    earlier text     the  cat  sat  on  the  mat  .                the pointer is at `on`
    decided so far   the  cat  sat | in                            a miss: the pointer moves on to `the` (one token was replaced)
    decided so far   the  cat  sat   quietly  on  the              `on the` stands behind the pointer: it moves there

Every decided token is compared with the one that the pointer foretold, drafted or not: so how well a text foretells is known
without a draft. Old comparisons count less than new ones. Another draft costs a row of the forward and gives a token if it and
all before it hold: if one token is worth `n` rows, drafts go on as long as that has a probability of at least 1 / (1 + n). Where
no earlier text drafts, the sample's own text is tried, as in prompt look-up. With a number as `k` a token is worth one row, and
what is drafted depends on the sample alone; `k: auto` finds out the worth by the time that steps take.

Sources: none for earlier runs. Look-up: Saxena, "Prompt lookup decoding", 2023.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from typing import Final

from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.samples import Sample

MATCHES: Final = (3, 2)
"""The tokens that must match where a pointer is set anew, the first number that does."""
_MEMORY: Final = 0.9
"""What a comparison counts after another one."""
MOST_AUTO: Final = 16
"""The largest worth of a token in rows (`k: auto`)."""
START: Final = 2
"""The worth at first: most texts of a job that runs again have not changed."""
MOST: Final = 64
"""The longest draft where `k` is auto."""
_SUREST: Final = 0.9999
_NOWHERE: Final = 1 << 60


class Foretold:
    """How many tokens a text has foretold, and how many not."""

    def __init__(self, hits: float, misses: float) -> None:
        self.hits, self.misses = hits, misses

    @property
    def rate(self) -> float:
        return self.hits / (self.hits + self.misses)

    def note(self, hit: bool) -> None:
        self.hits, self.misses = self.hits * _MEMORY + hit, self.misses * _MEMORY + (not hit)


class Pointer(Foretold):
    """Where in `source` the next token is foretold. `grows`: the source is the text itself, as far as it is decided; else it does
    not have the first `skipped` tokens, a prompt."""

    def __init__(self, source: list[int], skipped: int = 0, *, grows: bool = False) -> None:
        # A finished text is trusted for a few tokens; the sample's own has to earn it.
        super().__init__(*((0.5, 1.5) if grows else (1.7, 0.3)))
        self._source, self._grows = source, grows
        self._next, self._known = _NOWHERE if grows else 0, skipped
        # The places after each run of 2 or 3 tokens, ascending; of a finished text from its first miss on.
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def read(self, tokens: Sequence[int], decided: int) -> None:
        """Compare what was decided since the last call."""
        for rank in range(self._known, decided):
            hit = self._next < len(self._source) and self._next < (rank if self._grows else _NOWHERE)
            self._compare(tokens, rank, hit=hit and self._source[self._next] == tokens[rank])
            if self._grows:
                self._index(rank, rank + 1)
        self._known = decided

    def drafts(self, most: int, decided: int, least: float) -> list[int]:
        """The tokens that should come next: those that hold with a probability of at least `least`, at most `most`."""
        if self.rate <= least or self._next >= (decided if self._grows else len(self._source)):
            return []
        # After hundreds of hits the rate is 1 in floating point.
        count = min(most, int(log(least) / log(min(self.rate, _SUREST))))
        if not self._grows:
            return self._source[self._next : self._next + count]
        period = decided - self._next  # a repetition goes on
        return [self._source[self._next + place % period] for place in range(count)]

    def _compare(self, tokens: Sequence[int], rank: int, *, hit: bool) -> None:
        if self._next < _NOWHERE:
            self.note(hit)
            self._next += 1
        if hit:
            return
        if not self._grows and not self._ends:
            self._index(1, len(self._source))
        for count in MATCHES:
            ends = self._ends.get(tuple(tokens[rank + 1 - count : rank + 1]))
            if ends is not None and rank + 1 >= count:
                self._next = ends[min(bisect_left(ends, self._next), len(ends) - 1)]
                self.hits += count * _MEMORY  # these tokens are the same
                return

    def _index(self, start: int, end: int) -> None:
        """Note the runs before the places [start, end)."""
        for place in range(start, end):
            for count in MATCHES:
                if place >= count:
                    self._ends.setdefault(tuple(self._source[place - count : place]), []).append(place)


class EarlierTexts:
    """Drafts for one sample, and counts those from earlier runs that held. `worth` gives the rows that a token is worth."""

    def __init__(self, s: Sample, most: int, worth: Callable[[], int]) -> None:
        self._s, self._most, self._worth = s, most, worth
        self._accepted, self._is_earlier = 0, False
        self._earlier = [Pointer(text, s.prompt) for text in texts_by_rank(s)]
        self._own: Pointer | None = None

    def drafts(self, room: int) -> list[int]:
        """Up to `room` tokens that may follow the decided ones."""
        s, worth, most = self._s, self._worth(), min(room, self._most)
        least = 1.0 / (1 + worth)
        self.count()
        if not worth:
            return []
        for pointer in self._earlier:
            pointer.read(s.tokens, s.decided)
        best = max(self._earlier, key=lambda pointer: pointer.rate, default=None)
        drafts = best.drafts(most, s.decided, least) if best else []
        self._is_earlier = bool(drafts)
        if not drafts and most and s.order is None:
            self._own = self._own or Pointer(s.tokens, grows=True)
            self._own.read(s.tokens, s.decided)
            drafts = self._own.drafts(most, s.decided, least)
        s.nfe_draft += bool(drafts)
        return drafts

    def count(self) -> None:
        """Count the last drafts that held; also when the sample has ended."""
        s = self._s
        if self._is_earlier:
            s.reused += s.accepted - self._accepted
        self._accepted, self._is_earlier = s.accepted, False


class PlacedTexts:
    """The earlier texts of a canvas whose holes are filled in any order: they foretell the token of each hole, by its place."""

    def __init__(self, s: Sample, holes: Sequence[int]) -> None:
        self._s, self._accepted, self._is_earlier = s, 0, False
        self._texts = [
            (Foretold(1.7, 0.3), dict(zip(holes, text.tolist(), strict=False))) for text in s.request.earlier
        ]

    def redraft(self, drafts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Drafts (position, token) with the tokens of the text that foretells best, if that is more than half of them."""
        best, tokens = max(self._texts, key=lambda text: text[0].rate, default=(Foretold(0.0, 1.0), dict[int, int]()))
        if best.rate <= 0.5 or not drafts:
            return drafts
        self._is_earlier = True
        return [(place, tokens.get(place, token)) for place, token in drafts]

    def learn(self, news: Sequence[tuple[int, int]]) -> None:
        """Compare what was revealed, and count the drafts that held."""
        for text, tokens in self._texts:
            for place, token in news:
                text.note(tokens.get(place) == token)
        if self._is_earlier:
            self._s.reused += self._s.accepted - self._accepted
        self._accepted, self._is_earlier = self._s.accepted, False


def texts_by_rank(s: Sample) -> list[list[int]]:
    """The earlier texts of a sample, which are in the order of the canvas, in that of its ranks."""
    texts = [text.tolist() for text in s.request.earlier]
    if s.order is None:
        return texts
    holes = s.order[s.prompt :]
    place = {position: number for number, position in enumerate(sorted(holes))}
    return [[text[place[position]] for position in holes] if len(text) == len(holes) else text for text in texts]


def way_of(settings: RunDrafterSettings) -> Way:
    """How the clock may choose these drafts; with a number as `k` there is one choice."""
    return Way(MOST_AUTO, name="run") if settings.k == "auto" else Way(settings.k, settings.k - 1, name="run")


def texts_by(
    settings: RunDrafterSettings, auto: AutoLength | None = None
) -> tuple[Callable[[Sample], EarlierTexts], int, AutoLength | None]:
    """What makes the drafts of a sample, how long they are at most, and what chooses the worth of a token; by default its own
    clock."""
    if settings.k == "auto":
        auto = auto or AutoLength(Way(MOST_AUTO, name="run"), start=START)
        return partial(EarlierTexts, most=MOST, worth=auto), MOST, auto
    return partial(EarlierTexts, most=settings.k, worth=lambda: 1), settings.k, None
