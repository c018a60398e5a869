"""The numbers of committed units, of which there may be millions, in order; a byte each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final

BLOCK: Final = 2**14


class DoneUnits(Collection[int]):
    def __init__(self) -> None:
        self._there: dict[int, bytearray] = defaultdict(lambda: bytearray(BLOCK))
        self._count = 0

    def add(self, unit: int) -> None:
        block, place = self._there[unit // BLOCK], unit % BLOCK
        self._count += not block[place]
        block[place] = 1

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, int) and unit // BLOCK in self._there and bool(self._there[unit // BLOCK][unit % BLOCK])

    def __iter__(self) -> Iterator[int]:
        for block in sorted(self._there):
            yield from (block * BLOCK + place for place, there in enumerate(self._there[block]) if there)

    def __len__(self) -> int:
        return self._count
