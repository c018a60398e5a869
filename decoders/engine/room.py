"""How many samples fit: the slots and columns of the caches, within the batch limits and the device's memory.

A cache has no more slots than samples were inside at one time (and a few ahead), of no more columns than they need. Columns that
are no longer needed are freed when slots need their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.engine.memory import Account

_COLUMN_STEP: Final = 64
# The initial slots of a cache, as far as allowed: adding them one by one would copy the cache each time.
_FEWEST_SLOTS: Final = 8


class Room:
    """At most `max_rows` samples and `max_tokens` cached columns, and what `account` allows.

    `columns` gives the columns of a canvas length, of which a cache rounds up to a `multiple`; `slot_bytes` the bytes of a slot
    with that many columns.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        account: Account,
        multiple: int,
        columns: Callable[[int], int],
        slot_bytes: Callable[[int], int],
    ) -> None:
        if max_rows < 1 or max_tokens < 1:
            raise ValueError(f"batching: max_rows = {max_rows}, max_tokens = {max_tokens}; both must be at least 1")
        self.max_rows, self.max_tokens, self.account = max_rows, max_tokens, account
        self._multiple, self._columns, self._slot_bytes = multiple, columns, slot_bytes
        self.num_lanes = max_rows
        """How many slots there could be, with the columns that are needed now."""

    def columns(self, length: int) -> int:
        """How many columns a slot has if the longest canvas has this length."""
        return rounded(self._columns(length), self._multiple)

    def most_rows(self, num_columns: int) -> int:
        """How many samples fit with this many columns a slot; 0 if not even one does."""
        most = min(self.max_rows, self.max_tokens // num_columns)
        if self.account.slots is not None:
            most = min(most, max(self.account.slots, 0) // max(1, self._slot_bytes(num_columns)))
        return most

    def fits(self, num_rows: int, num_columns: int) -> bool:
        """Whether so many slots fit into memory, whatever the batch limits."""
        return self.account.slots is None or num_rows * self._slot_bytes(num_columns) <= self.account.slots

    def shape(self, now: tuple[int, int], *, needed: int, longest: int) -> tuple[int, int]:
        """The slots and columns that `needed` samples get; `now` is the present shape.

        Raises MemoryError for a sample that does not fit even alone.
        """
        least = self.columns(longest)
        if not self.fits(needed, least):
            asked, free = needed * self._slot_bytes(least), max(self.account.slots or 0, 0)
            raise MemoryError(
                f"a canvas of {longest} tokens does not fit into memory: its batch of {needed} would take {asked:,} bytes, "
                f"and {free:,} are there for all"
            )
        slots, columns = now[0], max(now[1], rounded(least, _COLUMN_STEP))
        if self.most_rows(columns) < max(needed, min(slots, self.most_rows(least))):
            columns = least
        self.num_lanes = max(self.most_rows(columns), needed)
        if slots < needed:
            slots = max(needed, _FEWEST_SLOTS, slots * 3 // 2)
        return min(slots, self.num_lanes), columns
