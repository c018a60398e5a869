"""RowLimit: how many rows a worker decodes at once after memory ran out. Pure; knows no decoder.

Memory runs out where many long samples meet, which passes: so the rows are halved at once, and grow again by an eighth after
some quiet steps at the limit. Each time that memory runs out again the quiet must last twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_STEPS = 64
MOST_QUIET_STEPS = 64 * 1024


@dataclass(slots=True)
class RowLimit:
    """`rows` is None until memory runs out for the first time."""

    rows: int | None = None
    _quiet: int = 0
    _wanted: int = QUIET_STEPS // 2

    def starved(self, rows: int) -> None:
        """Memory ran out with so many rows."""
        self.rows = max(1, rows // 2)
        self._quiet, self._wanted = 0, min(2 * self._wanted, MOST_QUIET_STEPS)

    def stepped(self, rows: int) -> None:
        """A step with so many rows went well; steps below the limit prove nothing."""
        if self.rows is None or rows < self.rows:
            return
        self._quiet += 1
        if self._quiet >= self._wanted:
            self.rows, self._quiet = self.rows + max(1, self.rows // 8), 0

    def room(self, room: int, resident: int) -> int:
        """What is left of a decoder's room beside so many resident rows."""
        return room if self.rows is None else min(room, self.rows - resident)
