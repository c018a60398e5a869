"""The set of committed units of a run, in one byte per unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

BLOCK = 2**16


class DoneUnits(Mapping[int, str]):
    """The committed units, each with the name of the object that commits it.

    A name is stored only if it differs from the one that `usual` gives.
    """

    def __init__(self, usual: Callable[[int], str]) -> None:
        self._usual = usual
        self._there: dict[int, bytearray] = {}
        self._names: dict[int, str] = {}
        self._count = 0

    def add(self, unit: int, name: str) -> None:
        """Add a unit; of several names the last counts."""
        self._count += unit not in self
        if unit // BLOCK not in self._there:
            self._there[unit // BLOCK] = bytearray(BLOCK)
        self._there[unit // BLOCK][unit % BLOCK] = 1
        self._names.pop(unit, None)
        if name != self._usual(unit):
            self._names[unit] = name

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, int) and unit // BLOCK in self._there and bool(self._there[unit // BLOCK][unit % BLOCK])

    def __getitem__(self, unit: int) -> str:
        if unit not in self:
            raise KeyError(unit)
        return self._names.get(unit) or self._usual(unit)

    def __iter__(self) -> Iterator[int]:
        for block in sorted(self._there):
            yield from (block * BLOCK + place for place, there in enumerate(self._there[block]) if there)

    def __len__(self) -> int:
        return self._count
