"""Pending units, in the order they are assigned: window by window, sorted by their tokens within each window.

The rows of a window are adjacent in the inputs, so a worker that takes its units one after another reads each part of the
input only once. The last windows count as one, longest first: the last units of a job are then the shortest, and no worker
ends up alone with a long one. Earlier windows alternate between rising and falling length, so that neighbouring units
always have similar lengths.

    tokens    9 7 4 2 | 1 3 6 8 | 9 8 6 5 3 2 1 1
    window       0    |    1    | the last ones
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Set

from draftmill.jobs.schedule.unit_sizes import UnitSize, UnitSizes

__all__ = ["LAST_UNITS", "UnitSize", "Waiting", "first_of_last"]

LAST_UNITS = 8
"""Minimum number of units per worker in the windows that count as the last one."""


class Waiting:
    """The waiting units in their order; skips units that have become `done` meanwhile.

    The order of all units is fixed at the start, as a column of places (4 bytes per unit). Units that come back are in a heap.
    """

    def __init__(self, units: UnitSizes, done: Set[int], workers: int) -> None:
        self._sizes = units
        self._done = done
        self._last_window = first_of_last(units.windows, LAST_UNITS * workers)
        self._order = array("i", sorted(range(len(units)), key=lambda place: self._turn(units.at(place))))
        self._next, self._end = 0, len(self._order)  # all places before and behind them are taken
        self._back: list[tuple[int, int, int]] = []
        self._skip = array("i", range(len(units) + 1))  # the next place in `_order` that is not taken, with shortcuts
        self._last = bisect_left(
            self._order, self._last_window, key=lambda place: min(units.windows[place], self._last_window)
        )
        self.tokens = sum(units.tokens)

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        while (next_ := self._free(self._next)) < len(self._order) and self._unit(next_) in self._done:
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
        fresh = self._sizes.at(self._order[self._next]) if self._next < len(self._order) else None
        if self._back and (fresh is None or self._back[0] < self._turn(fresh)):
            _, tokens, unit = heapq.heappop(self._back)
            self.tokens -= abs(tokens)
            return unit
        self._use(self._next)
        return self._unit(self._next)

    def take_fitting(self, tokens: float) -> int | None:
        """Remove and return the longest unit of the last windows, of at most so many tokens; None if there is none."""
        begin = max(self._next, self._last)
        place = bisect_left(self._order, -tokens, lo=begin, key=lambda place: -self._sizes.tokens[place])
        place = self._free(place)
        while place < len(self._order) and self._unit(place) in self._done:
            self._use(place)
            place = self._free(place)
        fresh = -self._sizes.tokens[self._order[place]] if place < len(self._order) else None
        last = (turn for turn in self._back if turn[0] == self._last_window)
        back = [turn for turn in last if -turn[1] <= tokens and turn[2] not in self._done]
        if back and (fresh is None or min(back)[1] < fresh):
            longest = min(back)
            self._back.remove(longest)
            heapq.heapify(self._back)
            self.tokens -= abs(longest[1])
            return longest[2]
        if fresh is None:
            return None
        self._use(place)
        return self._unit(place)

    def next_tokens(self) -> int:
        """The tokens of the unit that `take` would return; 0 if no unit waits."""
        if not self:
            return 0
        fresh = self._sizes.at(self._order[self._next]) if self._next < len(self._order) else None
        if self._back and (fresh is None or self._back[0] < self._turn(fresh)):
            return abs(self._back[0][1])
        return fresh.tokens if fresh is not None else 0

    def shortest(self) -> int | None:
        """The tokens of the shortest unit of the last windows, None if none of them waits."""
        if not self:
            return None
        begin = max(self._next, self._last)
        while self._end > begin and (
            self._skip[self._end - 1] != self._end - 1 or self._unit(self._end - 1) in self._done
        ):
            self._end -= 1
        found = [self._sizes.tokens[self._order[self._end - 1]]] if self._end > begin else []
        last = (turn for turn in self._back if turn[0] == self._last_window and turn[2] not in self._done)
        return min(found + [-tokens for _, tokens, _ in last], default=None)

    def _unit(self, place: int) -> int:
        return self._sizes.units[self._order[place]]

    def _free(self, place: int) -> int:
        """The first place from here on that is not taken."""
        found = place
        while self._skip[found] != found:
            found = self._skip[found]
        while self._skip[place] != found:
            self._skip[place], place = found, self._skip[place]
        return found

    def _use(self, place: int) -> None:
        self._skip[place] = place + 1
        self.tokens -= self._sizes.tokens[self._order[place]]

    def units(self) -> list[int]:
        """The waiting units, in no particular order."""
        places = range(self._next, len(self._order))
        fresh = [self._unit(place) for place in places if self._skip[place] == place]
        return [unit for unit in [*fresh, *(unit for *_, unit in self._back)] if unit not in self._done]

    def _turn(self, size: UnitSize) -> tuple[int, int, int]:
        window = min(size.window, self._last_window)
        goes_up = (self._last_window - window) % 2
        return window, size.tokens if goes_up else -size.tokens, size.unit


def first_of_last(windows: Iterable[int], wanted: int) -> int:
    """The first of the last windows that together have at least `wanted` units, or all of them; `windows` has each unit's."""
    counts = Counter(windows)
    total = 0
    for window in sorted(counts, reverse=True):
        total += counts[window]
        if total >= wanted:
            return window
    return 0
