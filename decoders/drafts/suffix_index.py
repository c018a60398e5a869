"""The index of the texts of a worker: its samples read themselves into it, and draft what followed the same words in any of them.

    read so far      .. x = self. | s  e  l  f  .  n  a  m  e        the longest end that stood elsewhere: `x = self.`
    others           y = self.name  z = self.name  w = self.size     `name` followed twice, `size` once
    drafts           name                                            as long as they are likely to hold, and not longer than
                                                                     a multiple of what matches

A sample's own text is in the index as far as it is decided, so a repetition in it is found as well. There are two automata: the
young one grows, the old one is only read. When the young one has half of the tokens that are allowed, it becomes the old one, and
what was old is forgotten: so the index holds the last texts, at least half of what is allowed.

What is drafted depends on the neighbours of a sample and on when they came. Pure: imports no torch.

Source: Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications", 2024 (arXiv 2411.04975): trees
over earlier outputs and the present request, drafts by frequency, their length by that of the match.
"""

from __future__ import annotations

from collections.abc import Iterable

from draftmill.decoders.drafts.automaton import NOWHERE, ROOT, Automaton
from draftmill.decoders.drafts.settings import SuffixDrafterSettings


class SuffixIndex:
    """Texts of up to `max_tokens` tokens in all. `era` counts how often the young automaton has become the old one."""

    __slots__ = ("_most", "era", "factor", "least", "old", "young")

    def __init__(self, settings: SuffixDrafterSettings) -> None:
        self.factor, self.least = settings.max_spec_factor, settings.min_token_prob
        self._most = settings.max_tokens // 2
        self.young, self.old, self.era = Automaton(), Automaton(), 0

    def make_room(self) -> None:
        """Forget the oldest texts where there are too many."""
        if self.young.size >= self._most:
            self.young, self.old, self.era = Automaton(), self.young, self.era + 1


class Reader:
    """Reads one text into the index, and drafts what may follow what it has read."""

    __slots__ = ("_era", "_index", "_last", "_length", "_match")

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self.begin()

    def begin(self) -> None:
        """Begin a new text: what comes does not follow what was read."""
        self._era = self._index.era
        # The state of the text in the young automaton; that of its longest end which the old one knows, and its length.
        self._last, self._match, self._length = ROOT, ROOT, 0

    def read(self, tokens: Iterable[int]) -> None:
        """Read on."""
        index = self._index
        for token in tokens:
            index.make_room()
            self._follow_era()
            self._last = index.young.extend(self._last, token)
            self._match, self._length = advanced(index.old, self._match, self._length, token)

    def _follow_era(self) -> None:
        index = self._index
        if self._era == index.era:
            return
        if self._era + 1 == index.era:  # what was young is old now, and the text is in it
            self._match, self._length = self._last, index.old.length[self._last]
        else:
            self._match, self._length = ROOT, 0
        self._last, self._era = ROOT, index.era

    def drafts(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow: what followed the longest context that any text has gone on from."""
        self._follow_era()
        index = self._index
        young, old = index.young, index.old
        own = shortened(young, self._last, young.length[self._last])
        other = shortened(old, self._match, self._length)
        automaton, (state, length) = (young, own) if own[1] >= other[1] else (old, other)
        most, found, sure = min(most, int(length * index.factor)), list[int](), 1.0
        while len(found) < most and length:
            sure *= automaton.count[state] / automaton.total[state]  # the probability that all so far hold
            if sure < index.least:
                break
            found.append(automaton.best[state])
            state, length = shortened(automaton, automaton.target[state], length + 1)
        return found


def shortened(automaton: Automaton, state: int, length: int) -> tuple[int, int]:
    """The state and length of the longest context, of those that end this one, which something has followed."""
    while automaton.best[state] == NOWHERE and state != ROOT:
        state = automaton.link[state]
        length = automaton.length[state]
    return state, length


def advanced(automaton: Automaton, state: int, length: int, token: int) -> tuple[int, int]:
    """The state of the longest end that the automaton knows, and its length, after one more token of a text."""
    while (found := automaton.step(state, token)) == NOWHERE:
        if state == ROOT:
            return ROOT, 0
        state = automaton.link[state]
        length = automaton.length[state]
    return found, length + 1
