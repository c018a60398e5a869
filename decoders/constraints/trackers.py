"""Which tokens may stand where, so that the finished text matches: from left to right, and in any order.

From left to right a state is known, and the tokens that may still come are counted:

    left     a token may come if the state after it reaches an end with the tokens that are then left

In any order a hole has decided tokens and others; the states before and after a place follow from both sides:

    hole     a  _  _  d  _           the token at place 1 leads from a state of `front` to one of `back`
    front    {0} -a-> {1}            the states that may be before place 1
    back     .. <-any- <-d- <-any- ends      those that may be after it

Both promise that a text which satisfies the constraint remains possible, whatever is drawn; so it is enough that one exists in
the beginning. Drafts are known only to rows that see them; a row after a draft that breaks the constraint may have anything,
since it is not accepted. Legend: see automaton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from draftmill.decoders.base import HOLE
from draftmill.decoders.constraints.automaton import Automaton, Bools

Known = Sequence[tuple[int, int]]
"""Positions and tokens that a row knows beyond those decided."""
Allowed = tuple[Hashable, Callable[[], Bools]] | None
"""What names a set of tokens, and the set, [V]; None: all."""


class Tracker(Protocol):
    """A constraint at work on one sample: which tokens its rows may draw."""

    def decide(self, position: int, token: int) -> None:
        """A token stands at a position from now on."""

    def allowed(self, position: int, known: Known) -> Allowed:
        """The tokens that may stand at a position, for a row that knows these drafts, too."""

    @property
    def is_met(self) -> bool:
        """Whether what is decided satisfies the constraint, as the finished text."""


class LeftToRight(Tracker):
    """For a text that is decided from position `start` on and fills the positions below `length`, unless one of `ends` ends it
    before."""

    def __init__(self, automaton: Automaton, start: int, length: int, ends: tuple[int, ...]) -> None:
        self._automaton, self._ends, self._length = automaton, ends, length
        self._next, self._state, self._has_ended = start, 0, False
        self._states: dict[tuple[int, ...], int] = {}  # after these drafts

    def decide(self, position: int, token: int) -> None:
        assert position == self._next, "a text is decided from left to right"
        self._next += 1
        if token in self._ends:
            self._has_ended = True
        else:
            self._state = self._automaton.step(self._state, token)
        self._states = {}

    def allowed(self, position: int, known: Known) -> Allowed:
        """See Tracker; `known` are the drafts from the next position on."""
        state = self._after(tuple(token for _, token in sorted(known)))
        if state < 0:
            return None
        left = self._length - position
        if self._ends:  # more tokens than are ever needed make no difference
            left = min(left, self._automaton.most_least + 1)
        return (self._automaton.number, state, left), lambda: self._set(state, left)

    def _after(self, drafts: tuple[int, ...]) -> int:
        if not drafts:
            return self._state
        if drafts not in self._states:
            self._states[drafts] = self._automaton.step(self._after(drafts[:-1]), drafts[-1])
        return self._states[drafts]

    def _set(self, state: int, left: int) -> Bools:
        allowed_V = self._automaton.allowed(state, left, exactly=not self._ends)
        if self._automaton.is_end_S[state]:
            allowed_V[list(self._ends)] = True
        return allowed_V

    @property
    def is_met(self) -> bool:
        return self._state >= 0 and bool(self._automaton.is_end_S[self._state])


class AnyOrder(Tracker):
    """For one hole, the positions [start, end), decided in any order; one of `ends` may end the text before."""

    def __init__(self, automaton: Automaton, start: int, end: int, ends: tuple[int, ...]) -> None:
        self._automaton = automaton.with_end(ends) if ends else automaton
        automaton, self._ends, self._start = self._automaton, ends, start
        self._tokens = [HOLE] * (end - start)
        self._num_front, self._front_S = 0, automaton.start()  # the decided beginning, and the states after it
        self._sweeps: dict[Known, tuple[list[Bools], list[Bools]]] = {}  # for rows that know these drafts

    def decide(self, position: int, token: int) -> None:
        self._tokens[position - self._start] = token
        while self._num_front < len(self._tokens) and self._tokens[self._num_front] != HOLE:
            self._front_S = self._automaton.after(self._front_S, self._tokens[self._num_front])
            self._num_front += 1
        self._sweeps = {}

    def allowed(self, position: int, known: Known) -> Allowed:
        place, drafts = position - self._start, tuple(sorted(known))
        if drafts not in self._sweeps:
            self._sweeps[drafts] = self._sweep(dict(drafts))
        before, after = self._sweeps[drafts]
        before_S, after_S = before[place - self._num_front], after[len(self._tokens) - 1 - place]
        name = (self._automaton.number, before_S.tobytes(), after_S.tobytes())
        return (name, lambda: self._automaton.between(before_S, after_S)) if before_S.any() and after_S.any() else None

    def _sweep(self, drafts: dict[int, int]) -> tuple[list[Bools], list[Bools]]:
        """The states before each place from the front's end on, and those after each place from the last one backwards."""
        tokens = [drafts.get(self._start + place, token) for place, token in enumerate(self._tokens)]
        before, after = [self._front_S], [self._automaton.is_end_S]
        for token in tokens[self._num_front : -1]:
            before.append(self._automaton.after(before[-1], None if token == HOLE else token))
        is_tail = True
        for count, token in enumerate(reversed(tokens[self._num_front + 1 :]), 1):
            is_tail = is_tail and token == HOLE
            known = None if token == HOLE else token
            after.append(self._automaton.tail(count) if is_tail else self._automaton.before(after[-1], known))
        return before, after

    @property
    def is_met(self) -> bool:
        has_ended = bool(self._ends) and bool(self._front_S[-1])
        is_whole = self._num_front == len(self._tokens)
        return has_ended or (is_whole and bool((self._front_S & self._automaton.is_end_S).any()))


class Holes(Tracker):
    """Holes of one canvas, each with its own tracker."""

    def __init__(self, trackers: Sequence[tuple[range, Tracker]]) -> None:
        self._trackers = [tracker for _, tracker in trackers]
        self._at = {position: tracker for positions, tracker in trackers for position in positions}

    def decide(self, position: int, token: int) -> None:
        if position in self._at:
            self._at[position].decide(position, token)

    def allowed(self, position: int, known: Known) -> Allowed:
        return self._at[position].allowed(position, known) if position in self._at else None

    @property
    def is_met(self) -> bool:
        return all(tracker.is_met for tracker in self._trackers)
