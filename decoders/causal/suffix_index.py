"""The index of the texts of a worker: its samples read themselves into it, and draft what followed the same words in any of them.

    read so far      .. x = self. | s  e  l  f  .  n  a  m  e        the longest end that stood elsewhere: `x = self.`
    others           y = self.name  z = self.name  w = self.size     `name` followed twice, `size` once
    drafts           name                                            as long as they are likely to hold, and not longer than
                                                                     a multiple of what matches

A sample's own text is in the index as far as it is decided, so a repetition in it is found as well. There are two automata: the
young one grows, the old one is only read. When the young one has half of the tokens that are allowed, it becomes the old one, and
what was old is forgotten: so the index holds the last texts, at least half of what is allowed.

What is drafted depends on the neighbours of a sample and on when they came. An automaton grows token by token, with counts
of what followed: O(1) a token, on average.

    texts      a b c | x b c d          the contexts `b c` and `c` have always stood in the same places: one state
    links      bc -> (empty)            the link of a state leads to the longest end of its contexts that also stood elsewhere
    continue   bc -> d, once            a transition, and how often it was followed

Counts are those of prediction by partial matching with update exclusion: a token is counted in the longest context that it had
followed before, and in all longer ones, in which it is new, but not in shorter ones.

Sources: Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications", 2024 (arXiv 2411.04975):
trees over earlier outputs and the present request, drafts by frequency, their length by that of the match. Blumer et al., "The
smallest automaton recognizing the subwords of a text", 1985, built as in Mohri, Moreno and Weinstein, "General suffix automaton
construction algorithm and space bounds", 2009, for several texts. Moffat, "Implementing the PPM data compression scheme", 1990
(update exclusion).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from draftmill.decoders.causal.settings import SuffixDrafterSettings

ROOT: Final = 0
"""The state of the empty context, where every text begins."""
NOWHERE: Final = -1

# A transition that is not the most frequent one of its state is one integer: how often it was followed, below that its target.
_ONCE: Final = 1 << 32
_TARGET: Final = _ONCE - 1


class SuffixIndex:
    """Texts of up to `max_tokens` tokens in all. `era` counts how often the young automaton has become the old one."""

    def __init__(self, settings: SuffixDrafterSettings) -> None:
        self.factor, self.least = settings.max_spec_factor, settings.min_token_prob
        self.most = settings.max_tokens // 2
        self.young, self.old, self.era = Automaton(), Automaton(), 0


class Reader:
    """Reads one text into the index, and drafts what may follow what it has read."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._era = index.era
        # The state of the text in the young automaton; that of its longest end which the old one knows, and its length.
        self._last, self._match, self._length = ROOT, ROOT, 0

    def read(self, tokens: Iterable[int]) -> None:
        index = self._index
        for token in tokens:
            if index.young.size >= index.most:
                # The oldest texts are forgotten.
                index.young, index.old, index.era = Automaton(), index.young, index.era + 1
            self._follow_era()
            self._last = index.young.extend(self._last, token)
            self._match, self._length = advance(index.old, self._match, self._length, token)

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
        own = shorten(young, self._last, young.length[self._last])
        other = shorten(old, self._match, self._length)
        automaton, (state, length) = (young, own) if own[1] >= other[1] else (old, other)
        most, tokens, sure = min(most, int(length * index.factor)), list[int](), 1.0
        while len(tokens) < most and length:
            sure *= automaton.count[state] / automaton.total[state]  # the probability that all so far hold
            if sure < index.least:
                break
            tokens.append(automaton.best[state])
            state, length = shorten(automaton, automaton.target[state], length + 1)
        return tokens


def shorten(automaton: Automaton, state: int, length: int) -> tuple[int, int]:
    """The state and the length of the longest suffix of this context that a token has followed."""
    while automaton.best[state] == NOWHERE and state != ROOT:
        state = automaton.link[state]
        length = automaton.length[state]
    return state, length


def advance(automaton: Automaton, state: int, length: int, token: int) -> tuple[int, int]:
    """The state of the longest end that the automaton knows, and its length, after one more token of a text."""
    while (target := automaton.step(state, token)) == NOWHERE:
        if state == ROOT:
            return ROOT, 0
        state = automaton.link[state]
        length = automaton.length[state]
    return target, length + 1


class Automaton:
    """States are numbers. `length[s]` is the length of the state's longest context, `link[s]` leads to a shorter one.
    `best[s]` is the token that followed most often, of several the last one that came so far, or NOWHERE; `target[s]` the
    state that it leads to, `count[s]` how often it was followed, and `total[s]` how often any token was. `size` counts the
    tokens that were not known to the automaton in their text: only these take memory."""

    def __init__(self) -> None:
        self.length, self.link = array("i", [0]), array("i", [NOWHERE])
        self.best, self.target = array("i", [NOWHERE]), array("i", [NOWHERE])
        self.count, self.total = array("i", [0]), array("q", [0])
        self._others: list[dict[int, int] | None] = [None]
        self.size = 0

    def step(self, state: int, token: int) -> int:
        """Where a token leads to, or NOWHERE."""
        if self.best[state] == token:
            return self.target[state]
        others = self._others[state]
        return NOWHERE if others is None or token not in others else others[token] & _TARGET

    def extend(self, state: int, token: int) -> int:
        """Add a token to a text whose last state this is; returns its new last state."""
        target = self.step(state, token)
        if target >= 0:
            self._count_again(state, token)
            if self.length[target] == self.length[state] + 1:
                return target
            self.size += 1
            return self._split(state, token, target)
        self.size += 1
        new, link = self._new(self.length[state] + 1, ROOT), self.link
        while state >= 0 and (target := self.step(state, token)) < 0:
            self._lead(state, token, new)
            state = link[state]
        if state >= 0:
            self._count_again(state, token)
            link[new] = target if self.length[target] == self.length[state] + 1 else self._split(state, token, target)
        return new

    def _new(self, length: int, link: int) -> int:
        self.length.append(length)
        self.link.append(link)
        for column in (self.best, self.target):
            column.append(NOWHERE)
        self.count.append(0)
        self.total.append(0)
        self._others.append(None)
        return len(self.length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """Give the shorter contexts of `target`, up to those that end `state` and the token, a state of their own."""
        new = self._new(self.length[state] + 1, self.link[target])
        for column in (self.best, self.target, self.count, self.total):
            column[new] = column[target]
        others = self._others[target]
        self._others[new] = None if others is None else others.copy()
        self.link[target] = new
        while state >= 0 and self.step(state, token) == target:
            if self.best[state] == token:
                self.target[state] = new
            else:
                others = self._others[state]
                assert others is not None, "the token leads to the state that is split"
                others[token] += new - (others[token] & _TARGET)
            state = self.link[state]
        return new

    def _lead(self, state: int, token: int, target: int) -> None:
        """A token follows a state for the first time."""
        self.total[state] += 1
        if self.count[state] > 1:
            self._keep(state, token, _ONCE | target)
            return
        if self.count[state] == 1:
            self._keep(state, self.best[state], _ONCE | self.target[state])
        self.best[state], self.target[state], self.count[state] = token, target, 1

    def _count_again(self, state: int, token: int) -> None:
        self.total[state] += 1
        if self.best[state] == token:
            self.count[state] += 1
            return
        others = self._others[state]
        assert others is not None, "the token has followed before"
        times, target = divmod(others[token] + _ONCE, _ONCE)
        if times < self.count[state]:
            others[token] += _ONCE
            return
        del others[token]
        others[self.best[state]] = self.count[state] * _ONCE | self.target[state]
        self.best[state], self.target[state], self.count[state] = token, target, times

    def _keep(self, state: int, token: int, packed: int) -> None:
        others = self._others[state]
        if others is None:
            others = self._others[state] = {}
        others[token] = packed
