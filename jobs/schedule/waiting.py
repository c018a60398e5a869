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
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

LAST_UNITS = 8
"""Minimum number of units per worker in the windows that count as the last one."""


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit of the plan: its number, its rows, its cost in tokens, and the window whose rows it is made of."""

    unit: int
    rows: int
    tokens: int
    window: int = 0


class Waiting:
    """A heap of units; skips units that have become `done` meanwhile."""

    def __init__(self, units: Iterable[UnitSize], done: Set[int], workers: int) -> None:
        known = list(units)
        self._done = done
        self._last_window = first_of_last(known, LAST_UNITS * workers)
        self._heap = [self._turn(size) for size in known]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        while self._heap and self._heap[0][-1] in self._done:
            heapq.heappop(self._heap)
        return bool(self._heap)

    def put(self, size: UnitSize) -> None:
        """Add a unit that is not waiting yet."""
        heapq.heappush(self._heap, self._turn(size))

    def take(self) -> int | None:
        """Remove and return the next unit; None if no unit waits."""
        return heapq.heappop(self._heap)[-1] if self else None

    def units(self) -> list[int]:
        """The waiting units, in no particular order."""
        return [unit for *_, unit in self._heap if unit not in self._done]

    def _turn(self, size: UnitSize) -> tuple[int, int, int]:
        window = min(size.window, self._last_window)
        goes_up = (self._last_window - window) % 2
        return window, size.tokens if goes_up else -size.tokens, size.unit


def first_of_last(units: Iterable[UnitSize], wanted: int) -> int:
    """The first of the last windows that together have at least `wanted` units, or all of them."""
    counts = Counter(size.window for size in units)
    total = 0
    for window in sorted(counts, reverse=True):
        total += counts[window]
        if total >= wanted:
            return window
    return 0
