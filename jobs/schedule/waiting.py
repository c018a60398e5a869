"""Pending units, in the order they are assigned: window by window, sorted by length within each window.

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
from collections import Counter
from collections.abc import Iterable, Set

from jobs.schedule.unit_sizes import UnitSize, UnitSizes

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
        self._next = 0
        self._back: list[tuple[int, int, int]] = []

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        while self._next < len(self._order) and self._sizes.units[self._order[self._next]] in self._done:
            self._next += 1
        while self._back and self._back[0][-1] in self._done:
            heapq.heappop(self._back)
        return bool(self._back) or self._next < len(self._order)

    def put(self, size: UnitSize) -> None:
        """Add a unit that is not waiting."""
        heapq.heappush(self._back, self._turn(size))

    def take(self) -> int | None:
        """Remove and return the next unit; None if no unit waits."""
        if not self:
            return None
        fresh = self._sizes.at(self._order[self._next]) if self._next < len(self._order) else None
        if self._back and (fresh is None or self._back[0] < self._turn(fresh)):
            return heapq.heappop(self._back)[-1]
        assert fresh is not None
        self._next += 1
        return fresh.unit

    def units(self) -> list[int]:
        """The waiting units, in no particular order."""
        fresh = [self._sizes.units[place] for place in self._order[self._next :]]
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
