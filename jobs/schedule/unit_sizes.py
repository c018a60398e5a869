"""The sizes of a plan's units in columns of numbers, and sets of units: a job may have millions of units.

A UnitSize is made when it is asked for. Twenty-four bytes per unit instead of some two hundred.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableSet
from dataclasses import dataclass

BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class UnitSize:
    """A unit of the plan: its number, its rows, its cost in tokens, and the window whose rows it is made of."""

    unit: int
    rows: int
    tokens: int
    window: int = 0


class UnitSizes(Mapping[int, UnitSize]):
    """The units by number. They are added in the order of their numbers, as a plan lists them, or sorted first."""

    def __init__(self, sizes: Iterable[UnitSize]) -> None:
        self.units, self.row_counts, self.windows = array("q"), array("i"), array("i")
        self.tokens = array("q")
        for size in sizes:
            if self.units and size.unit <= self.units[-1]:
                self._insert(size)
                continue
            self.units.append(size.unit)
            self.row_counts.append(size.rows)
            self.tokens.append(size.tokens)
            self.windows.append(size.window)

    def _insert(self, size: UnitSize) -> None:
        place = bisect_left(self.units, size.unit)
        assert self.units[place] != size.unit, f"unit {size.unit} is there twice"
        self.units.insert(place, size.unit)
        self.row_counts.insert(place, size.rows)
        self.tokens.insert(place, size.tokens)
        self.windows.insert(place, size.window)

    @property
    def rows(self) -> int:
        """Sum of the rows of all units."""
        return sum(self.row_counts)

    def place(self, unit: object) -> int | None:
        """The unit's place in the columns; None if it is not there."""
        if not isinstance(unit, int):
            return None
        found = bisect_left(self.units, unit)
        return found if found < len(self.units) and self.units[found] == unit else None

    def at(self, place: int) -> UnitSize:
        """The unit at a place in the columns."""
        return UnitSize(self.units[place], self.row_counts[place], self.tokens[place], self.windows[place])

    def __contains__(self, unit: object) -> bool:
        return self.place(unit) is not None

    def __getitem__(self, unit: int) -> UnitSize:
        found = self.place(unit)
        if found is None:
            raise KeyError(unit)
        return self.at(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)


class UnitSet(MutableSet[int]):
    """A set of units in a byte for each, whatever their order."""

    def __init__(self, units: Iterable[int] = ()) -> None:
        self._blocks: dict[int, bytearray] = {}
        self._count = 0
        for unit in units:
            self.add(unit)

    def add(self, unit: int) -> None:
        """Add a unit."""
        self._count += unit not in self
        self._blocks.setdefault(unit // BLOCK, bytearray(BLOCK))[unit % BLOCK] = 1

    def discard(self, unit: int) -> None:
        """Remove a unit if it is there."""
        if unit in self:
            self._blocks[unit // BLOCK][unit % BLOCK] = 0
            self._count -= 1

    def __contains__(self, unit: object) -> bool:
        return (
            isinstance(unit, int) and unit // BLOCK in self._blocks and bool(self._blocks[unit // BLOCK][unit % BLOCK])
        )

    def __iter__(self) -> Iterator[int]:
        for block in sorted(self._blocks):
            yield from (block * BLOCK + place for place, there in enumerate(self._blocks[block]) if there)

    def __len__(self) -> int:
        return self._count
