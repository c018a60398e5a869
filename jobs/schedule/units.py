"""The units of a plan: their sizes, and the order in which pending ones are assigned. There may be millions.

They are assigned window by window, sorted by their tokens within each window. The rows of a window are adjacent in the inputs, so
a worker that takes its units one after another reads each part of the input only once. The last windows count as one, longest
first: the last units of a job are then the shortest, and no worker ends up alone with a long one. Earlier windows alternate
between rising and falling length, so that neighbouring units always have similar lengths.

    tokens    9 7 4 2 | 1 3 6 8 | 9 8 6 5 3 2 1 1
    window       0    |    1    | the last ones
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import neg

import numpy as np
from numpy.typing import ArrayLike

LAST_UNITS = 8
"""Minimum number of units per worker in the windows that count as the last one."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit of the plan: its number, its rows, its cost in tokens, and the window whose rows it is made of."""

    unit: int
    rows: int
    tokens: int
    window: int = 0


class UnitSizes(Mapping[int, UnitSize]):
    """The sizes by unit, in columns of 16 bytes a unit up to the largest number; a unit that is not there has 0 rows."""

    def __init__(self, sizes: Iterable[UnitSize]) -> None:
        fields = np.dtype([("unit", "i8"), ("rows", "i4"), ("tokens", "i8"), ("window", "i4")])
        table = np.fromiter(((size.unit, size.rows, size.tokens, size.window) for size in sizes), dtype=fields)
        count = int(table["unit"].max(initial=-1)) + 1
        self.row_counts, self.tokens = np.zeros(count, np.int32), np.zeros(count, np.int64)
        self.windows = np.zeros(count, np.int32)
        self.row_counts[table["unit"]] = table["rows"]
        self.tokens[table["unit"]] = table["tokens"]
        self.windows[table["unit"]] = table["window"]
        self.numbers = np.flatnonzero(self.row_counts)
        assert len(self.numbers) == len(table), "a unit is there twice, or has no rows"

    @property
    def rows(self) -> int:
        return int(self.row_counts.sum(dtype=np.int64))

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, int) and 0 <= unit < len(self.row_counts) and self.row_counts[unit] > 0

    def __getitem__(self, unit: int) -> UnitSize:
        if unit not in self:
            raise KeyError(unit)
        return UnitSize(unit, int(self.row_counts[unit]), int(self.tokens[unit]), int(self.windows[unit]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)


Turn = tuple[int, int, int]
"""The place of a unit in the order: its window, its tokens (negative where longer units come first), its number."""


class WaitingUnits:
    """The waiting units in their order; skips units that have become `done` meanwhile.

    The order of all units is fixed at the start, in columns. Units that come back are in a heap.
    """

    def __init__(self, units: UnitSizes, done: Collection[int], workers: int) -> None:
        self._sizes = units
        self._done = done
        windows, tokens = units.windows[units.numbers], units.tokens[units.numbers]
        self._last_window = first_of_last(windows, LAST_UNITS * workers)
        windows = np.minimum(windows, self._last_window)
        order = np.lexsort((np.where((self._last_window - windows) % 2, tokens, -tokens), windows))
        self._order = array("q", units.numbers[order].tobytes())
        self._tokens = array("q", tokens[order].tobytes())
        self._next, self._end = 0, len(self._order)  # all places before and behind them are taken
        self._back: list[Turn] = []
        self._skip = array("i", range(len(units) + 1))  # the next place in `_order` that is not taken, with shortcuts
        self._last = int(np.searchsorted(windows[order], self._last_window))
        self.tokens = int(tokens.sum())

    def __bool__(self) -> bool:
        while (next_ := self._free(self._next)) < len(self._order) and self._order[next_] in self._done:
            self._use(next_)
        self._next = next_
        while self._back and self._back[0][-1] in self._done:
            self.tokens -= abs(heapq.heappop(self._back)[1])
        return bool(self._back) or self._next < len(self._order)

    @property
    def is_last(self) -> bool:
        """Whether only units of the last windows wait, longest first."""
        return bool(self) and self._next >= self._last and all(turn[0] == self._last_window for turn in self._back)

    def put(self, size: UnitSize) -> None:
        """Add a unit that is not waiting."""
        heapq.heappush(self._back, self._turn(size))
        self.tokens += size.tokens

    def take(self) -> int | None:
        """Remove and return the next unit; None if no unit waits."""
        if not self:
            return None
        if self._is_back_next():
            _, tokens, unit = heapq.heappop(self._back)
            self.tokens -= abs(tokens)
            return unit
        self._use(self._next)
        return self._order[self._next]

    def take_fitting(self, tokens: float) -> int | None:
        """Remove and return the longest unit of the last windows, of at most so many tokens; None if there is none."""
        begin = max(self._next, self._last)
        place = self._free(bisect_left(self._tokens, -tokens, lo=begin, key=neg))
        while place < len(self._order) and self._order[place] in self._done:
            self._use(place)
            place = self._free(place)
        fresh = -self._tokens[place] if place < len(self._order) else None
        back = [turn for turn in self._last_of_back() if -turn[1] <= tokens]
        if back and (fresh is None or min(back)[1] < fresh):
            longest = min(back)
            self._back.remove(longest)
            heapq.heapify(self._back)
            self.tokens -= abs(longest[1])
            return longest[2]
        if fresh is None:
            return None
        self._use(place)
        return self._order[place]

    def next_tokens(self) -> int:
        """The tokens of the unit that `take` would return; 0 if no unit waits."""
        if not self:
            return 0
        return abs(self._back[0][1]) if self._is_back_next() else self._tokens[self._next]

    def shortest(self) -> int | None:
        """The tokens of the shortest unit of the last windows, None if none of them waits."""
        if not self:
            return None
        begin = max(self._next, self._last)
        while self._end > begin and (
            self._skip[self._end - 1] != self._end - 1 or self._order[self._end - 1] in self._done
        ):
            self._end -= 1
        fresh = [self._tokens[self._end - 1]] if self._end > begin else []
        return min(fresh + [-tokens for _, tokens, _ in self._last_of_back()], default=None)

    def _is_back_next(self) -> bool:
        """Whether the next unit is one that came back; there is one."""
        if self._next == len(self._order):
            return True
        return bool(self._back) and self._back[0] < self._turn(self._sizes[self._order[self._next]])

    def _last_of_back(self) -> list[Turn]:
        return [turn for turn in self._back if turn[0] == self._last_window and turn[2] not in self._done]

    def _free(self, place: int) -> int:
        """The first place from here on that is not taken."""
        free = place
        while self._skip[free] != free:
            free = self._skip[free]
        while self._skip[place] != free:
            self._skip[place], place = free, self._skip[place]
        return free

    def _use(self, place: int) -> None:
        self._skip[place] = place + 1
        self.tokens -= self._tokens[place]

    def _turn(self, size: UnitSize) -> Turn:
        window = min(size.window, self._last_window)
        goes_up = (self._last_window - window) % 2
        return window, size.tokens if goes_up else -size.tokens, size.unit


def first_of_last(windows: ArrayLike, wanted: int) -> int:
    """The first of the last windows that together have at least `wanted` units, or all of them; `windows` has each unit's."""
    ordered = np.sort(windows)
    return int(ordered[-min(wanted, len(ordered))]) if len(ordered) else 0
