"""Automata over tokens: the states of a regular expression, and for each state the tokens that may follow.

    expression   -?[0-9]{1,2}
    bytes        0 -(-)-> 1      0, 1 -(0-9)-> 2      2 -(0-9)-> 3         2 and 3 are ends
    tokens       "-" "-1" "12" "7" ..     0 -("-1")-> 2      0 -("12")-> 3     a token's bytes, one after the other
    least        0: 1    1: 1    2: 0    3: 0      the fewest tokens to an end

expressions.py makes the automaton over bytes. Most tokens are alike for an expression, so edges are found and kept for classes
of equivalent tokens.

An end is an accepting state. Edges that reach no end are left out, as are tokens without text (special tokens, the mask).

Legend: S states, E edges, V vocabulary, K classes, C children, L nodes of a level of the tree, T tokens, M maps
of states, P pairs of a map and a byte, B kinds of bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.constraints.expressions import Dfa, Node, Text, dfa_of
from draftmill.decoders.constraints.regex import machine_of

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

_log = logging.getLogger(__name__)

FAR: Final = 1 << 30
"""The value of `least` where no end can be reached."""
_ENTRIES_AT_ONCE: Final = 1 << 22
_MOST_EDGES: Final = 8_000_000
_NUMBERS = count()


class _Level(NamedTuple):
    """The trie's nodes at one depth. Node l has the children first_L[l] .. first_L[l + 1] - 1 in the next level, reached by the
    bytes `byte_C`. The tokens that end at node l begin at token_first_L[l] in `token_T`."""

    first_L: Ints
    byte_C: Ints
    token_first_L: Ints
    token_T: Ints


class Vocabulary:
    """A trie of all tokens by their bytes; None for a token without text."""

    def __init__(self, spelled: Sequence[bytes | None]) -> None:
        self.size = len(spelled)
        ids = [token for token, text in enumerate(spelled) if text]
        texts = [spelled[token] or b"" for token in ids]
        length_T = np.array([len(text) for text in texts], dtype=np.int64)
        width = int(length_T.max(initial=0))
        byte_TW = np.zeros((len(ids), width), dtype=np.int64)
        for place, text in enumerate(texts):
            byte_TW[place, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        token_T, node_T, num_nodes = np.array(ids, dtype=np.int64), np.zeros(len(ids), dtype=np.int64), 1
        self.levels = list[_Level]()
        for depth in range(width + 1):
            ends_T = length_T == depth
            token_first, tokens = _grouped(node_T[ends_T], token_T[ends_T], num_nodes)
            goes_T = ~ends_T
            code_T = node_T[goes_T] * 256 + (byte_TW[goes_T, depth] if depth < width else 0)
            codes, child_T = np.unique(code_T, return_inverse=True)
            first = np.searchsorted(codes // 256, np.arange(num_nodes + 1))
            self.levels.append(_Level(first, codes % 256, token_first, tokens))
            length_T, byte_TW, token_T = length_T[goes_T], byte_TW[goes_T], token_T[goes_T]
            node_T, num_nodes = child_T.reshape(-1).astype(np.int64), len(codes)


def _grouped(key_T: Ints, value_T: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Values sorted by key, as (the offset of each key's first value, the values)."""
    order_T = np.argsort(key_T, kind="stable")
    return np.searchsorted(key_T[order_T], np.arange(num_keys + 1)), value_T[order_T]


class Automaton:
    """States 0 .. `num_states` - 1; 0 is the start. `class_V` is each token's class: tokens of one class have the same edges, and
    class 0 has none. Edge e goes from `state_E` to `next_E` by a token of `class_E`; edges are sorted by state, then class.
    `least_S` is the fewest tokens to an end, FAR where there is no way to one."""

    def __init__(self, state_E: Ints, class_E: Ints, next_E: Ints, is_end_S: Bools, class_V: Ints) -> None:
        self.is_end_S, self.num_states, self.class_V = is_end_S, len(is_end_S), class_V
        self.num_classes, self.vocab_size = int(class_V.max(initial=0)) + 1, len(class_V)
        self.least_S = _least(state_E, next_E, is_end_S)
        kept_E = self.least_S[next_E] < FAR
        order_E = np.lexsort((class_E[kept_E], state_E[kept_E]))
        self.state_E, self.class_E, self.next_E = (each_E[kept_E][order_E] for each_E in (state_E, class_E, next_E))
        self.first_S = np.searchsorted(self.state_E, np.arange(self.num_states + 1))
        self.most_least = int(self.least_S[self.least_S < FAR].max(initial=0))
        """The largest finite `least_S`: with this many tokens left no edge is too long."""
        self.number = next(_NUMBERS)
        """A number that this process gives to no other automaton, ever."""
        self._tails, self._with_end = [is_end_S], dict[tuple[int, ...], Automaton]()

    @property
    def num_bytes(self) -> int:
        return 8 * (4 * len(self.state_E) + self.vocab_size)

    def edges(self, state: int) -> slice:
        return slice(int(self.first_S[state]), int(self.first_S[state + 1]))

    def step(self, state: int, token: int) -> int:
        """The state after a token, -1 if the token is not allowed."""
        if state < 0:
            return -1
        part = self.edges(state)
        token_class = self.class_V[token]
        at = int(np.searchsorted(self.class_E[part], token_class))
        if at < part.stop - part.start and self.class_E[part.start + at] == token_class:
            return int(self.next_E[part.start + at])
        return -1

    def allowed(self, state: int, left: int, *, exactly: bool) -> Bools:
        """Which tokens may follow `state`, [V], when at most `left` tokens remain, this one included, or `exactly` that many."""
        part = self.edges(state)
        good_S = self.tail(left - 1) if exactly else self.least_S < left
        return self._tokens(self.class_E[part][good_S[self.next_E[part]]])

    def _tokens(self, classes: Ints) -> Bools:
        """The tokens of some classes, [V]."""
        is_in_K = np.zeros(self.num_classes, dtype=np.bool_)
        is_in_K[classes] = True
        return is_in_K[self.class_V]

    @cached_property
    def _pairs(self) -> tuple[Ints, Ints]:
        """All distinct (state, next state) pairs."""
        return np.divmod(np.unique(self.state_E * self.num_states + self.next_E), self.num_states)

    @cached_property
    def _by_class(self) -> tuple[Ints, Ints]:
        """Edges sorted by class, as (the offset of each class, the edges)."""
        return _grouped(self.class_E, np.arange(len(self.class_E)), self.num_classes)

    def start(self) -> Bools:
        """The set of the start state alone, [S]."""
        return np.arange(self.num_states) == 0

    def after(self, before_S: Bools, token: int | None) -> Bools:
        """The states that a token reaches from a set of states, [S]; None: that any token reaches."""
        state_P, next_P = self._pairs if token is None else self._edges_of(token)
        after_S = np.zeros(self.num_states, dtype=np.bool_)
        after_S[next_P[before_S[state_P]]] = True
        return after_S

    def before(self, after_S: Bools, token: int | None) -> Bools:
        """The states from which a token reaches a set of states, [S]; None: any token."""
        state_P, next_P = self._pairs if token is None else self._edges_of(token)
        before_S = np.zeros(self.num_states, dtype=np.bool_)
        before_S[state_P[after_S[next_P]]] = True
        return before_S

    def tail(self, count: int) -> Bools:
        """The states from which exactly `count` tokens can reach an end, [S]."""
        while len(self._tails) <= count:
            self._tails.append(self.before(self._tails[-1], None))
        return self._tails[count]

    def between(self, before_S: Bools, after_S: Bools) -> Bools:
        """The tokens that lead from one set of states into another, [V]."""
        return self._tokens(self.class_E[before_S[self.state_E] & after_S[self.next_E]])

    def _edges_of(self, token: int) -> tuple[Ints, Ints]:
        (first, edges), token_class = self._by_class, self.class_V[token]
        mine = edges[first[token_class] : first[token_class + 1]]
        return self.state_E[mine], self.next_E[mine]

    def with_end(self, ends: tuple[int, ...]) -> Automaton:
        """The automaton for a canvas that a text may fill in part: after an end comes one of the tokens `ends`, then anything."""
        if ends in self._with_end:
            return self._with_end[ends]
        done, ended = self.num_states, np.flatnonzero(self.is_end_S)
        class_V, end_classes = self.class_V.copy(), self.num_classes + np.arange(len(ends))
        class_V[list(ends)] = end_classes
        all_classes = np.arange(self.num_classes + len(ends))
        state_E = np.concatenate([self.state_E, np.repeat(ended, len(ends)), np.full(len(all_classes), done)])
        class_E = np.concatenate([self.class_E, np.tile(end_classes, len(ended)), all_classes])
        next_E = np.concatenate([self.next_E, np.full(len(ended) * len(ends) + len(all_classes), done)])
        self._with_end[ends] = Automaton(state_E, class_E, next_E, np.append(self.is_end_S, True), class_V)
        return self._with_end[ends]


def _least(state_E: Ints, next_E: Ints, is_end_S: Bools) -> Ints:
    """The fewest tokens from each state to an end, [S]."""
    num_states = len(is_end_S)
    state_P, next_P = np.divmod(np.unique(state_E * num_states + next_E), num_states)
    least_S, reached_S, num_tokens = np.where(is_end_S, 0, FAR), is_end_S, 0
    while reached_S.any():
        num_tokens += 1
        news = state_P[reached_S[next_P]]
        news = news[least_S[news] == FAR]
        least_S[news] = num_tokens
        reached_S = np.zeros(num_states, dtype=np.bool_)
        reached_S[news] = True
    return least_S


def automaton_of(wanted: str | Node | None, vocabulary: Vocabulary) -> Automaton:
    """The automaton of a regular expression that must match the whole text, or of a node. ValueError if it can't be compiled, is
    too large, or if no text of these tokens matches."""
    node = Text(machine) if isinstance(wanted, str) and (machine := machine_of(wanted)) else wanted
    machine = None if isinstance(node, str) else dfa_of(node, in_bytes=True)
    if machine is not None:
        _log.debug("compiling a constraint (%s states)", f"{len(machine.edges):,}")
    automaton = None if machine is None else _over_tokens(machine, vocabulary)
    if automaton is None or automaton.least_S[0] == FAR:
        raise ValueError(f"no text of this vocabulary matches{f' {wanted!r}' if isinstance(wanted, str) else ''}")
    return automaton


def _over_tokens(machine: Dfa, vocabulary: Vocabulary) -> Automaton:
    """The edges of all tokens, found level by level of the vocabulary's trie.

    A prefix of tokens maps states to states, and many prefixes have the same map, so each distinct (map, byte) pair is computed
    once. Maps are compared by sums of 64-bit hashes: among 100,000 maps a collision has a probability of about 1e-9.
    """
    next_SB, class_B = _table(machine)
    num_states, num_bytes = next_SB.shape
    state_E: Ints = np.arange(num_states, dtype=np.int32)
    now_E = state_E
    first_M, hash_M, map_L = np.array([0, num_states]), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    class_V, known = np.zeros(vocabulary.size, dtype=np.int64), dict[int, int]()
    parts, num_edges = list[tuple[Ints, ...]](), 0
    for level in vocabulary.levels:
        map_T = np.repeat(map_L, np.diff(level.token_first_L))
        for number in np.unique(map_T[map_T >= 0]).tolist():
            if (name := int(hash_M[number])) not in known:
                known[name] = len(known) + 1
                part = slice(first_M[number], first_M[number + 1])
                parts.append((state_E[part], np.full(part.stop - part.start, known[name]), now_E[part]))
                num_edges += part.stop - part.start
                if num_edges > _MOST_EDGES:
                    raise ValueError(f"its automaton has more than {_MOST_EDGES:,} edges; allowed: smaller counts")
            class_V[level.token_T[map_T == number]] = known[name]
        map_C = np.repeat(map_L, np.diff(level.first_L))
        code_C = np.where(map_C < 0, -1, map_C * num_bytes + class_B[level.byte_C])
        codes, pair_C = np.unique(code_C, return_inverse=True)
        state_E, now_E, first_M, hash_M, map_P = _longer(next_SB, codes[codes >= 0], (state_E, now_E, first_M))
        map_L = np.concatenate([np.full(int((codes < 0).sum()), -1), map_P])[pair_C.reshape(-1)]
    empty = np.zeros(0, dtype=np.int64)
    state_E, class_E, next_E = (
        np.concatenate(each).astype(np.int64) for each in zip((empty,) * 3, *parts, strict=True)
    )
    return Automaton(state_E, class_E, next_E, np.array(machine.ends), class_V)


def _longer(
    next_SB: Ints, codes_P: Ints, maps: tuple[Ints, Ints, Ints]
) -> tuple[Ints, Ints, Ints, NDArray[np.uint64], Ints]:
    """The distinct maps after each (map, byte) pair: their entries, each map's offset and hash; and the map of each pair, or -1
    where no state is left."""
    state_E, now_E, first_M = maps
    map_P, byte_P = codes_P // next_SB.shape[1], codes_P % next_SB.shape[1]
    total_P = np.cumsum(first_M[map_P + 1] - first_M[map_P])
    sum_P = np.zeros(len(codes_P), dtype=np.uint64)
    cuts = np.searchsorted(total_P, np.arange(0, int(total_P.max(initial=1)), _ENTRIES_AT_ONCE))
    found = list[tuple[Ints, Ints, Ints]]()
    seen = np.zeros(0, dtype=np.uint64)
    for first, last in zip(cuts, [*cuts[1:], len(codes_P)], strict=True):
        which, entry = _spread(first_M[map_P[first:last]], first_M[map_P[first:last] + 1])
        which += first
        next_E = next_SB[now_E[entry], byte_P[which]]
        which, entry, next_E = which[next_E >= 0], entry[next_E >= 0], next_E[next_E >= 0]
        if not len(which):
            continue
        pairs, begin = np.unique(which, return_index=True)
        sum_P[pairs] = np.add.reduceat(_mixed(state_E[entry], next_E), begin)
        news, place = np.unique(sum_P[pairs], return_index=True)
        fresh = np.zeros(len(codes_P), dtype=np.bool_)
        fresh[pairs[place[~np.isin(news, seen)]]] = True
        seen, kept = np.union1d(seen, news), fresh[which]
        found.append((which[kept], state_E[entry[kept]], next_E[kept]))
    if not found:
        return state_E[:0], now_E[:0], np.zeros(1, dtype=np.int64), seen, np.full(len(codes_P), -1)
    which, state_E, now_E = (np.concatenate(each) for each in zip(*found, strict=True))
    owners, begin = np.unique(which, return_index=True)
    place = np.searchsorted(seen, sum_P)
    number = np.empty(len(seen), dtype=np.int64)
    number[np.searchsorted(seen, sum_P[owners])] = np.arange(len(owners))
    map_P = np.where(sum_P == 0, -1, number[np.minimum(place, len(seen) - 1)])
    return state_E, now_E, np.append(begin, len(which)), sum_P[owners], map_P


def _mixed(state_E: Ints, next_E: Ints) -> NDArray[np.uint64]:
    """A hash of each edge, by SplitMix64's finaliser."""
    hash_E = (state_E.astype(np.uint64) << np.uint64(32)) + next_E.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hash_E = (hash_E ^ (hash_E >> np.uint64(shift))) * np.uint64(factor)
    return hash_E ^ (hash_E >> np.uint64(31))


def _table(machine: Dfa) -> tuple[Ints, Ints]:
    """The transition table [S, B] over classes of bytes, -1 where there is no edge, and the class of each byte."""
    edges = [(state, *step) for state, mine in enumerate(machine.edges) for step in mine]
    steps = np.array(edges, dtype=np.int64).reshape(-1, 4)
    bounds = np.unique(np.concatenate([[0], steps[:, 1], steps[:, 2] + 1]))
    bounds = bounds[bounds < 256]
    which, kind = _spread(np.searchsorted(bounds, steps[:, 1]), np.searchsorted(bounds, steps[:, 2] + 1))
    next_SB = np.full((len(machine.edges), len(bounds)), -1, dtype=np.int32)
    next_SB[steps[which, 0], kind] = steps[which, 3]
    _, firsts, inverse = np.unique(next_SB, axis=1, return_index=True, return_inverse=True)
    class_B = inverse.reshape(-1)[np.searchsorted(bounds, np.arange(256), side="right") - 1]
    return next_SB[:, firsts], class_B


def _spread(first_F: Ints, stop_F: Ints) -> tuple[Ints, Ints]:
    """The indices of some ranges [first, stop), joined: for each index the number of its range, and the index itself."""
    count_F = stop_F - first_F
    which = np.repeat(np.arange(len(first_F)), count_F)
    return which, np.arange(len(which)) + np.repeat(first_F - (count_F.cumsum() - count_F), count_F)
