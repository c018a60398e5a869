"""The canvases that `ssd` runs at once, and where their rows stand: each a canvas of its own, or windows around a cache.

    nodes with three drafts a, b, c     chain: 0 = {}, 1 = {a}, 2 = {a b}, 3 = {a b c}
                                        mixed: also 4 = {b}, 5 = {a c}

A chain of nodes stands for forwards of `stepwise` that would follow each other. So with a cache each node runs the window that
its forward would run, and reads every other position from the last node before it that ran it, in the same layer of the same
forward:

    block_length 3, refresh 9    the canvas     block 0   block 1         runs                reads
    node 0 (the root)            the big _      _ _ _     . . .           block 0             the cache
    node 1                       the big cat    _ _ _     . . .           blocks 0 and 1      the cache
    node 2                       the big cat    _ on _    . . .           block 1             block 0 as node 1 ran it, the cache

    columns                      0 .. canvas .. | node 1 | node 2 | ..

The root runs the whole canvas if its forward rebuilds the cache (a *refresh*); drafts end before the next one. Keys and values
that the last right node reads, and that the next forward won't compute again, are copied into the cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.looks import MOST_SIGHTS, NO_MORE, SIDE, LookRows, Pick
from draftmill.decoders.masked.cached_windows import Run

Sight = list[tuple[int, int, int]]
"""What a node sees: positions [low, high) stand in the columns from the third number on."""


@dataclass(slots=True)
class Node:
    """A canvas with some drafts; it continues the node `before`.

    `drafts` are the numbers of its drafts, `gone` those that they have among the masks of the canvas. `block` is that of its
    first mask, `sight` what it sees. `asked` are the stretches that it answers: (block, from position, to position, how many
    picks, whether these are all of the block's masks).
    """

    drafts: list[int]
    before: int
    gone: list[int]
    block: int = 0
    sight: Sight = field(default_factory=list)
    asked: list[tuple[int, int, int, int, bool]] = field(default_factory=list)

    def nth_mask(self, holes: Sequence[int], number: int) -> int:
        """The position of its mask with this number, or of its last one."""
        at = min(number, len(holes) - len(self.gone) - 1)
        for index in self.gone:
            at += index <= at
        return holes[at]

    def masks(self, holes: Sequence[int], low: int, high: int) -> list[int]:
        """Its masks at positions [low, high)."""
        first, end = bisect_left(holes, low), bisect_left(holes, high)
        gone = self.gone[bisect_left(self.gone, first) : bisect_left(self.gone, end)]
        found = list(holes[first:end])
        for index in reversed(gone):
            del found[index - first]
        return found


def plant(holes: Sequence[int], drafts: Sequence[tuple[int, int]], *, mixed: bool) -> list[Node]:
    """The chain of canvases with 0, 1, .. drafts (position, token); if `mixed`, also those without the last but one."""
    where, num = [bisect_left(holes, position) for position, _ in drafts], len(drafts)
    chain = [Node(list(range(count)), max(count - 1, 0), sorted(where[:count])) for count in range(num + 1)]
    if not mixed:
        return chain
    others = [Node([*range(i), i + 1], i, sorted([*where[:i], where[i + 1]])) for i in range(num - 1)]
    return chain + others


class Standing:
    """Where the nodes of a round stand: builds the spans and stretches of an ask, node after node.

    Each node answers its `best` surest masks in each of the first blocks that hold `count` of its masks.
    """

    def __init__(self, s: Canvas, drafts: Sequence[tuple[int, int]], shift: int, *, count: int, best: int) -> None:
        self._s, self._drafts, self._shift, self._count, self._best = s, drafts, shift, count, best
        self.rows = LookRows(shift)
        self._column = SIDE

    def alone(self, number: int, node: Node) -> None:
        """A node without a cache: a whole canvas of its own."""
        length = self._s.length
        sees = (0, length, *NO_MORE)
        self._ask(node, [(self.rows.run(self._canvas(node), 0, length, column=0, node=number, sees=sees), 0, length)])

    def root(self, node: Node, runs: Sequence[Run]) -> None:
        """The canvas itself, in its own columns."""
        node.sight = [(0, self._s.length, 0)]
        self._stand(0, node, runs, beside=False)

    def beside(self, number: int, node: Node, before: Node, runs: Sequence[Run]) -> None:
        """A node beside the canvas, which sees what the node before it sees, except what it runs itself."""
        node.sight, column = before.sight, self._column
        for low, high in runs:
            node.sight = overlaid(node.sight, low, high, column)
            column += high - low
        self._stand(number, node, runs, beside=True)

    def _stand(self, number: int, node: Node, runs: Sequence[Run], *, beside: bool) -> None:
        sees, parts, canvas = columns_of(node.sight), [], self._canvas(node)
        for low, high in runs:
            column = self._column if beside else low
            first = self.rows.run(canvas, low, high, column=column, node=number, sees=sees)
            if beside:
                self._column += high - low
            # The positions that these rows predict.
            parts.append((first, low + self._shift if low else 0, high + self._shift))
        self._ask(node, parts)

    def _canvas(self, node: Node) -> NDArray[np.int64]:
        """The tokens of a node, HOLE at masks."""
        if not node.drafts:
            return self._s.canvas
        canvas = self._s.canvas.copy()
        for index in node.drafts:
            position, token = self._drafts[index]
            canvas[position] = token
        return canvas

    def _ask(self, node: Node, parts: Sequence[tuple[int, int, int]]) -> None:
        """Ask about a node's masks: `parts` are spans, and the positions [low, high) that each can tell."""
        s, block = self._s, node.block
        end = s.end_of(s.block(node.nth_mask(s.holes, self._count - 1)))
        while (start := s.origin + block * s.size if block else 0) < end:
            stop = s.end_of(block)
            total = len(node.masks(s.holes, start, stop))
            for first, can_low, can_high in parts if total else ():
                low, high = max(start, can_low), min(stop, can_high)
                if low < high and (masks := node.masks(s.holes, low, high)):
                    best = min(self._best, len(masks))
                    self.rows.read(first, masks, best=best, draw=s.revealed + len(node.gone))
                    node.asked.append((block, low, high, best, len(masks) == total))
            block += 1


def overlaid(sight: Sight, low: int, high: int, column: int) -> Sight:
    """A sight in which the positions [low, high) stand in the columns from `column` on."""
    found: Sight = []
    for first, end, at in sight:
        if first < low:
            found.append((first, min(end, low), at))
        if end > high:
            start = max(first, high)
            found.append((start, end, at + start - first))
    return sorted([*found, (low, high, column)])


def columns_of(sight: Sight) -> list[int]:
    """The columns of a sight as stretches [low, high), the empty ones last.

    Drafts reach two blocks. So five stretches are the most: what is before the first block, between the two and behind the
    second, and each block where it was last run.
    """
    found: list[list[int]] = []
    for low, high in sorted((at, at + end - first) for first, end, at in sight if first < end):
        if found and found[-1][1] == low:
            found[-1][1] = high
        else:
            found.append([low, high])
    assert len(found) <= MOST_SIGHTS, f"a node sees {len(found)} stretches of columns"
    return [number for stretch in found for number in stretch] + [0] * 2 * (MOST_SIGHTS - len(found))


def moved(sight: Sight, window: Run) -> list[int]:
    """What stands beside the canvas and is not run by the next forward's window: (from column, to column, count) each."""
    copies: list[int] = []
    for first, end, at in sight:
        for low, high in ((first, min(end, window[0])), (max(first, window[1]), end)):
            if low < high and at != first:
                copies += (at + low - first, low, high - low)
    return copies


def cut(picks: Sequence[Pick], nodes: Sequence[Node]) -> list[list[list[Pick]]]:
    """The picks of each stretch of each node."""
    said: list[list[list[Pick]]] = []
    first = 0
    for node in nodes:
        own = []
        for *_, best, _ in node.asked:
            own.append(list(picks[first : first + best]))
            first += best
        said.append(own)
    return said


class Readings:
    """What was last said of the masks of each block, the surest first: the drafts of later rounds.

    A reading speaks of its own step, and of as many after it as were asked for, each with the tokens that the step would draw.
    """

    def __init__(self) -> None:
        # Of each block the first step, and the picks of that and of the next ones.
        self._known: dict[int, tuple[int, list[list[Pick]]]] = {}

    def learn(self, node: Node, said_A: Sequence[Sequence[Sequence[Pick]]], first: int) -> None:
        """Take a node's readings of the steps from `first` on. Of a block that was read in part, the others stay as they were."""
        for block in dict.fromkeys(asked[0] for asked in node.asked):
            own = [index for index, asked in enumerate(node.asked) if asked[0] == block]
            ranges = [
                (0, 1 << 60) if is_whole else (low, high)
                for _, low, high, _, is_whole in map(node.asked.__getitem__, own)
            ]
            news = []
            for step, said in enumerate(said_A, first):
                old = [pick for pick in self._at(block, step) if not any(low <= pick[1] < high for low, high in ranges)]
                news.append(sorted([*old, *(pick for index in own for pick in said[index])]))
            self._known[block] = first, news

    def _at(self, block: int, step: int) -> Sequence[Pick]:
        """What was said of a block in a step, or in the next one that there is."""
        if block not in self._known:
            return ()
        first, picks_A = self._known[block]
        return picks_A[min(max(step - first, 0), len(picks_A) - 1)]

    def drafts(self, s: Canvas, last_block: int, most: int) -> list[tuple[int, int]]:
        """(position, token) of up to so many masks up to `last_block`, block by block, each from the picks of its step."""
        found = dict[int, int]()
        for block in sorted(block for block in self._known if block <= last_block):
            while len(found) < most:
                picks = self._at(block, s.revealed + len(found))
                pick = next((pick for pick in picks if s.tokens[pick[1]] < 0 and pick[1] not in found), None)
                if pick is None:
                    break
                found[pick[1]] = pick[2]
        return list(found.items())
