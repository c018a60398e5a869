"""What the holes of one request must match, and the trackers that follow its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftmill.decoders.base import HOLE
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.grammar import ByGrammar, Grammar
from draftmill.decoders.constraints.trackers import AnyOrder, Holes, LeftToRight, Tracker


@dataclass(frozen=True)
class Constraint:
    """The automaton of each hole of a canvas, in their order; None for a hole without one. `ends` are the tokens that end a
    completion before its canvas does, which then is its only hole."""

    automata: tuple[Automaton | Grammar | None, ...]
    ends: tuple[int, ...] = ()

    def problem(self, lengths: Sequence[int]) -> str | None:
        """Why holes of these lengths can't be filled; None if they can."""
        for number, (automaton, length) in enumerate(zip(self.automata, lengths, strict=True)):
            if automaton is None or isinstance(automaton, Grammar):
                continue
            if self.ends:
                if automaton.least_S[0] > length:
                    return f"the shortest text that matches it has {automaton.least_S[0]} tokens, but {length} may be generated"
            elif not automaton.tail(length)[0]:
                return f"no text of exactly {length} tokens matches it (hole {number})"
        return None


def tracker_of(constraint: Constraint, canvas: Sequence[int], *, in_order: bool) -> Tracker:
    """The tracker of a canvas, HOLE where a token is to be generated; `in_order`: from left to right. ValueError if no text of
    its holes' lengths matches."""
    is_hole = np.array([0, *canvas, 0]) == HOLE  # holes are runs of them
    edges = np.flatnonzero(is_hole[1:] != is_hole[:-1]).reshape(-1, 2)
    holes = [range(start, end) for start, end in edges.tolist()]
    assert len(holes) == len(constraint.automata), "a constraint has an automaton for each hole"
    problem = constraint.problem([len(hole) for hole in holes])
    if problem:
        raise ValueError(problem)
    trackers, kind = list[tuple[range, Tracker]](), LeftToRight if in_order else AnyOrder
    for hole, automaton in zip(holes, constraint.automata, strict=True):
        if isinstance(automaton, Grammar):
            trackers.append((hole, ByGrammar(automaton, constraint.ends)))
        elif automaton is not None:
            trackers.append((hole, kind(automaton, hole.start, hole.stop, constraint.ends)))
    return Holes(trackers)
