"""Expressions as automata: over characters, where they can be intersected and negated, and then over bytes.

    Node      what a text may be: fixed bytes, a character, a graph of nodes, or an automaton over characters
    Nfa       the states of a node, with steps that read nothing
    Dfa       one next state at most for each character, or for each byte

Nothing is joined as text: a node is put into another as states. A node that no text matches is None, and whatever needs it is
None, too; so "can this hold at all" is known while an expression is built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeVar

_Name = TypeVar("_Name", bound=Hashable)
Ranges = tuple[tuple[int, int], ...]
"""Code points, or bytes: [first, last] in ascending order, without overlaps."""
Step = tuple[int, int, int]
"""The first and the last symbol that lead to a state, and the state."""

MOST_STATES: Final = 60_000
"""Maximum number of states over bytes: at worst a few seconds to build, and a few hundred MB."""
MOST_STEPS: Final = 1_000_000
"""Maximum number of edges of all states together: about 200 MB."""
MOST_WORK: Final = 10_000_000
"""Maximum number of edge comparisons in the subset construction: a few seconds."""
LAST: Final = 0x10FFFF
BEGIN, END, BEFORE_LINE_END, ANY = LAST + 1, LAST + 2, LAST + 3, LAST + 3
"""Symbols before and behind a text, for `^` and `$`, and before its last line end; and the last symbol of all."""
_ESCAPES: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 47: "/", 92: "\\"}
_PLAIN: Final[Ranges] = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, LAST))
WRITABLE: Final[Ranges] = ((8, 10), (12, 13), (0x20, 0x7E), (0xA0, 0xD7FF), (0xE000, LAST))
"""The characters of a string of JSON that is not given: no control characters without a short escape, no surrogates."""


class TooLarge(ValueError):
    def __init__(self) -> None:
        super().__init__(
            f"its automaton has more than {MOST_STATES:,} states, or too many of them are possible at once; allowed: smaller "
            "counts, fewer alternatives"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """States 0 .. `count` - 1, 0 the start; a node leads from one to another. `ends` are those where a text may end."""

    count: int
    edges: tuple[tuple[int, Node, int], ...]
    ends: frozenset[int]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text that an automaton accepts: over characters, also `quoted` as a string of JSON, or over bytes (`raw`)."""

    machine: Dfa
    quoted: bool = False
    raw: bool = False


Node = bytes | Chars | Graph | Text
EMPTY: Final = b""


def graph(
    edges: Iterable[tuple[Hashable, Node | None, Hashable]], start: Hashable, ends: Iterable[Hashable]
) -> Node | None:
    """A graph whose states have any names, without edges that lead to no end; None if no end can be reached."""
    real = [(first, node, last) for first, node, last in edges if node is not None]
    forward, back = (defaultdict[Hashable, list[Hashable]](list) for _ in range(2))
    for first, _, last in real:
        forward[first].append(last)
        back[last].append(first)
    kept = _reached([start], forward.__getitem__) & _reached(ends := list(ends), back.__getitem__)
    if start not in kept:
        return None
    number = {start: 0}
    for name in (name for edge in real for name in (edge[0], edge[2]) if name in kept):
        number.setdefault(name, len(number))
    good = tuple((number[first], node, number[last]) for first, node, last in real if {first, last} <= kept)
    size = len(number) + sum(size_of(node) for _, node, _ in good)
    return Graph(len(number), good, frozenset(number[name] for name in ends if name in kept), size)


def _reached(starts: Iterable[_Name], after: Callable[[_Name], Iterable[_Name]]) -> set[_Name]:
    """The states that can be reached from some; `after` gives those one step further."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        for name in after(waiting.pop()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def size_of(node: Node) -> int:
    """The approximate number of states of a node."""
    if isinstance(node, bytes):
        return len(node)
    if isinstance(node, Text):
        return 8 * len(node.machine.edges)
    return node.size if isinstance(node, Graph) else 1


def sequence(*parts: Node | None) -> Node | None:
    return graph([(place, part, place + 1) for place, part in enumerate(parts)], 0, [len(parts)])


def either(parts: Iterable[Node | None]) -> Node | None:
    """One of them; None if there are none."""
    real = [part for part in parts if part is not None]
    return real[0] if len(real) == 1 else graph([(0, part, 1) for part in real], 0, [1])


def optional(part: Node | None) -> Node | None:
    return graph([(0, part, 1)], 0, [0, 1])


def repeated(part: Node | None, least: int, most: int | None) -> Node | None:
    """It, some times; `most` None: any number."""
    if max(least, most or 0) > MOST_STATES:
        raise TooLarge
    edges = [(place, part, place + 1) for place in range(least if most is None else most)]
    if most is None:
        edges += [(least, EMPTY, "loop"), ("loop", part, "loop")]  # type: ignore[list-item]
    return graph(edges, 0, [*range(least, (least if most is None else most) + 1), "loop"])


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """State 0 is the start; the steps of each state in ascending order, and whether a text may end there."""

    edges: list[list[Step]]
    ends: list[bool]

    def accepts(self, symbols: Iterable[int]) -> bool:
        state = 0
        for symbol in symbols:
            found = self.step(state, symbol)
            if found is None:
                return False
            state = found
        return self.ends[state]

    def step(self, state: int, symbol: int) -> int | None:
        return next((to for first, last, to in self.edges[state] if first <= symbol <= last), None)

    def live(self) -> set[int]:
        """The states from which an end can be reached."""
        back = defaultdict[int, list[int]](list)
        for state, steps in enumerate(self.edges):
            for _, _, to in steps:
                back[to].append(state)
        return _reached([state for state, is_end in enumerate(self.ends) if is_end], back.__getitem__)

    def texts(self, most: int) -> list[tuple[int, ...]] | None:
        """All texts that it accepts; None if they are more than `most`."""
        live, found = self.live(), list[tuple[int, ...]]()
        waiting: list[tuple[tuple[int, ...], int]] = [((), 0)]
        while waiting:
            text, state = waiting.pop()
            if self.ends[state]:
                found.append(text)
            for first, last, to in self.edges[state]:
                if to in live:
                    if last - first > most or len(text) > 1000:
                        return None
                    waiting += [((*text, symbol), to) for symbol in range(first, last + 1)]
            if len(found) > most or len(waiting) > 100 * most:
                return None
        return sorted(found)


def explored(start: Any, steps: Callable[[Any], Iterable[tuple[int, int, Any]]], is_end: Callable[[Any], bool]) -> Dfa:
    """The automaton whose states are named, and their steps found, from the start on. TooLarge beyond MOST_STATES
    or MOST_STEPS."""
    number, names, edges, count = {start: 0}, [start], list[list[Step]](), 0
    for name in names:
        mine = list[Step]()
        for first, last, to in steps(name):
            if to not in number:
                number[to] = len(names)
                names.append(to)
            mine.append((first, last, number[to]))
        edges.append(mine)
        count += len(mine)
        if len(names) > MOST_STATES or count > MOST_STEPS:
            raise TooLarge
    return Dfa(edges, [is_end(name) for name in names])


def _trimmed(machine: Dfa) -> Dfa | None:
    live = machine.live()
    if len(live) == len(machine.edges):
        return machine
    if 0 not in live:
        return None
    edges = [[step for step in steps if step[2] in live] for steps in machine.edges]
    return explored(0, edges.__getitem__, machine.ends.__getitem__)


def both(first: Dfa | None, other: Dfa | None) -> Dfa | None:
    """The texts that both accept; None if there are none."""
    if first is None or other is None:
        return None

    def steps(pair: tuple[int, int]) -> Iterator[tuple[int, int, Hashable]]:
        mine, theirs = first.edges[pair[0]], other.edges[pair[1]]
        place = 0
        for low, high, to in mine:
            while place < len(theirs) and theirs[place][1] < low:
                place += 1
            at = place
            while at < len(theirs) and theirs[at][0] <= high:
                yield max(low, theirs[at][0]), min(high, theirs[at][1]), (to, theirs[at][2])
                at += 1

    return _trimmed(explored((0, 0), steps, lambda pair: first.ends[pair[0]] and other.ends[pair[1]]))


def negated(machine: Dfa | None) -> Dfa:
    if machine is None:
        return Dfa([[(0, LAST, 0)]], [True])
    sink = len(machine.edges)
    others = ([(*gap, sink) for gap in inverted([step[:2] for step in steps])] for steps in machine.edges)
    edges = [sorted([*steps, *more]) for steps, more in zip(machine.edges, others, strict=True)]
    return Dfa([*edges, [(0, LAST, sink)]], [*(not is_end for is_end in machine.ends), True])


def inverted(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found, place = list[tuple[int, int]](), 0
    for first, last in sorted(ranges):
        if first > place:
            found.append((place, first - 1))
        place = max(place, last + 1)
    return (*found, (place, LAST)) if place <= LAST else tuple(found)


def common(first: Ranges, other: Ranges) -> Ranges:
    return inverted((*inverted(first), *inverted(other)))


def counted(ranges: Ranges, least: int, most: int | None) -> Dfa | None:
    """Some characters out of these."""
    last = least if most is None else most
    if last < least:
        return None
    if last > MOST_STATES:
        raise TooLarge
    edges = [[(low, high, min(place + 1, last)) for low, high in ranges] for place in range(last + (most is None))]
    return Dfa(edges + [[]] * (most is not None), [place >= least for place in range(last + 1)])


class Nfa:
    """States with steps, and with jumps that read nothing. `in_bytes`: characters are read as UTF-8."""

    def __init__(self, *, in_bytes: bool) -> None:
        self.steps, self.jumps, self._in_bytes = list[list[Step]](), list[list[int]](), in_bytes
        self._tails = dict[tuple[int, tuple[tuple[int, int], ...]], int]()

    def state(self) -> int:
        if len(self.steps) > 4 * MOST_STATES:
            raise TooLarge
        self.steps.append([])
        self.jumps.append([])
        return len(self.steps) - 1

    def add(self, node: Node, start: int, end: int) -> None:
        """The ways of a node from one state to another."""
        match node:
            case bytes():
                for symbol in node[:-1]:
                    after = self.state()
                    self.steps[start].append((symbol, symbol, after))
                    start = after
                if node:
                    self.steps[start].append((node[-1], node[-1], end))
                else:
                    self.jumps[start].append(end)
            case Chars():
                self._read(node.ranges, start, end)
            case Graph():
                states = [self.state() for _ in range(node.count)]
                self.jumps[start].append(states[0])
                for first, part, last in node.edges:
                    self.add(part, states[first], states[last])
                for last in node.ends:
                    self.jumps[states[last]].append(end)
            case Text():
                self._add_text(node, start, end)

    def _add_text(self, node: Text, start: int, end: int) -> None:
        machine = node.machine
        states = [self.state() for _ in machine.edges]
        (self.add(b'"', start, states[0]) if node.quoted else self.jumps[start].append(states[0]))
        for state, steps in zip(states, machine.edges, strict=True):
            if node.raw:
                self.steps[state] += [(low, high, states[to]) for low, high, to in steps]
                continue
            escape = self.state() if node.quoted else -1
            by_next = defaultdict[int, list[tuple[int, int]]](list)
            for low, high, to in steps:
                by_next[to].append((low, high))
            for to, ranges in by_next.items():
                if not node.quoted:
                    self._read(tuple(ranges), state, states[to])
                    continue
                self._read(common(tuple(ranges), _PLAIN), state, states[to])
                for code, letter in _ESCAPES.items():
                    if any(low <= code <= high for low, high in ranges):
                        self.steps[escape].append((ord(letter), ord(letter), states[to]))
            if node.quoted and self.steps[escape]:
                self.steps[state].append((0x5C, 0x5C, escape))
        for state, is_end in zip(states, machine.ends, strict=True):
            if is_end:
                self.add(b'"' if node.quoted else EMPTY, state, end)

    def _read(self, ranges: Ranges, start: int, end: int) -> None:
        if not self._in_bytes:
            self.steps[start] += [(low, high, end) for low, high in ranges]
            return
        for head, tail in _utf8(ranges):
            self.steps[start].append((*head, self._tail(tail, end)))

    def _tail(self, tail: tuple[tuple[int, int], ...], end: int) -> int:
        if not tail:
            return end
        if (end, tail) not in self._tails:
            state = self.state()
            self.steps[state].append((*tail[0], self._tail(tail[1:], end)))
            self._tails[end, tail] = state
        return self._tails[end, tail]

    def closure(self, states: Iterable[int]) -> tuple[int, ...]:
        """The states after these without reading; those without steps and jumps only if they are the last one added."""
        found = _reached(states, self.jumps.__getitem__)
        return tuple(sorted(state for state in found if self.steps[state] or not self.jumps[state]))


@lru_cache(maxsize=256)
def _utf8(ranges: Ranges) -> list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]:
    """The first bytes of characters, and the bytes that follow them, as ranges."""
    found = list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]]()
    for first, last in common(ranges, ((0, 0xD7FF), (0xE000, LAST))):
        for low, high, size in ((0, 0x7F, 1), (0x80, 0x7FF, 2), (0x800, 0xFFFF, 3), (0x10000, LAST, 4)):
            if first <= high and last >= low:
                found += [(parts[0], parts[1:]) for parts in _parts(max(first, low), min(last, high), size)]
    return found


def _parts(first: int, last: int, size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Characters of `size` bytes as products of ranges of bytes: split wherever a later byte does not have its whole range."""
    for place in range(1, size):
        mask = (1 << 6 * place) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                yield from _parts(first, first | mask, size)
                yield from _parts((first | mask) + 1, last, size)
                return
            if last & mask != mask:
                yield from _parts(first, (last & ~mask) - 1, size)
                yield from _parts(last & ~mask, last, size)
                return
    yield tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))


def dfa_of(node: Node | None, *, in_bytes: bool, is_search: bool = False) -> Dfa | None:
    """The automaton of a node, over characters or bytes; None if nothing matches. TooLarge beyond MOST_STATES. `is_search`:
    anything may follow."""
    if node is None:
        return None
    nfa = Nfa(in_bytes=in_bytes)
    start, end = nfa.state(), nfa.state()
    nfa.add(node, start, end)
    if is_search:
        nfa.steps[end].append((0, ANY, end))
    known, work = dict[tuple[tuple[int, ...], int], tuple[int, ...]](), 0

    def closed(states: tuple[int, ...], symbol: int) -> tuple[int, ...]:
        """The states after reading; `^` and `$` hold as often as they are asked for at one place."""
        key = states, max(symbol, LAST)
        if key not in known:
            found = nfa.closure(states)
            while symbol > LAST:
                more = {to for state in found for low, high, to in nfa.steps[state] if low <= symbol <= high}
                if more <= {*found, *states}:
                    break
                states = (*states, *more)
                found = nfa.closure(states)
            known[key] = (end,) if is_search and end in found else found
        return known[key]

    def steps(states: tuple[int, ...]) -> Iterator[tuple[int, int, Hashable]]:
        nonlocal work
        edges = [step for state in states for step in nfa.steps[state]]
        edges.sort()
        work += len(edges)
        if work > MOST_WORK:
            raise TooLarge
        if all(edge[1] < other[0] for edge, other in pairwise(edges)):
            for low, high, to in edges:
                yield low, high, closed((to,), low)
            return
        points = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        work += len(edges) * len(points)
        if work > MOST_WORK:
            raise TooLarge
        for low, after in pairwise(points):
            found = tuple(sorted({to for first, last, to in edges if first <= low <= last}))
            if found:
                yield low, after - 1, closed(found, low)

    return _trimmed(explored(closed((start,), 0), steps, lambda states: end in states))
