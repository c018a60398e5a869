"""The units of a plan: their sizes, and the order in which pending ones are assigned. There may be millions.

They are assigned window by window, sorted by their tokens within each window. The rows of a window are adjacent in the inputs, so
a worker that takes its units one after another reads each part of the input only once. The last windows count as one, longest
first: the last units of a job are then the shortest, and no worker ends up alone with a long one. Earlier windows alternate
between rising and falling length, so that neighbouring units always have similar lengths.

    tokens    9 7 4 2 | 1 3 6 8 | 9 8 6 5 3 2 1 1
    window       0    |    1    | the last ones
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


class WaitingUnits:
    """The waiting units in their order; the array begins with the last one."""

    def __init__(self, units: UnitSizes, workers: int) -> None:
        self._sizes = units
        windows, tokens = units.windows[units.numbers], units.tokens[units.numbers]
        self._last_window = first_of_last(windows, LAST_UNITS * workers)
        windows = np.minimum(windows, self._last_window)
        order = np.lexsort((np.where((self._last_window - windows) % 2, tokens, -tokens), windows))
        self._order = array("q", units.numbers[order[::-1]].tobytes())
        self.tokens = int(tokens.sum())

    def __bool__(self) -> bool:
        return bool(self._order)

    def __iter__(self) -> Iterator[int]:
        return reversed(self._order)

    @property
    def is_last(self) -> bool:
        """Whether only units of the last windows wait, longest first."""
        return bool(self) and self._turn(self._order[-1])[0] == -self._last_window

    def put(self, unit: int) -> None:
        """Add a unit that is not waiting."""
        insort(self._order, unit, key=self._turn)
        self.tokens += self._tokens(unit)

    def discard(self, unit: int) -> None:
        """Remove a unit, if it waits."""
        place = bisect_left(self._order, self._turn(unit), key=self._turn)
        if self._order[place : place + 1] == array("q", [unit]):
            self._pop(place)

    def take(self) -> int | None:
        """Remove and return the next unit; None if no unit waits."""
        return self._pop(-1) if self else None

    def take_fitting(self, tokens: float) -> int | None:
        """Remove and return the longest unit of the last windows, of at most so many tokens; None if there is none."""
        fitting = bisect_right(self._order, (-self._last_window, tokens, 1), key=self._turn)
        return self._pop(fitting - 1) if fitting else None

    def next_tokens(self) -> int:
        """The tokens of the unit that `take` would return; 0 if no unit waits."""
        return self._tokens(self._order[-1]) if self else 0

    def shortest(self) -> int | None:
        """The tokens of the shortest unit of the last windows, None if none of them waits."""
        window, tokens, _ = self._turn(self._order[0]) if self else (1, 0, 0)
        return int(tokens) if window == -self._last_window else None

    def _pop(self, place: int) -> int:
        unit = self._order.pop(place)
        self.tokens -= self._tokens(unit)
        return unit

    def _tokens(self, unit: int) -> int:
        return int(self._sizes.tokens[unit])

    def _turn(self, unit: int) -> tuple[int, float, int]:
        """What the array is sorted by: negative window and number, and tokens, negative in a window that goes up."""
        window = min(int(self._sizes.windows[unit]), self._last_window)
        goes_up = (self._last_window - window) % 2
        return -window, -self._tokens(unit) if goes_up else self._tokens(unit), -unit


def first_of_last(windows: ArrayLike, wanted: int) -> int:
    """The first of the last windows that together have at least `wanted` units, or all of them; `windows` has each unit's."""
    ordered = np.sort(windows)
    return int(ordered[-min(wanted, len(ordered))]) if len(ordered) else 0
