"""RowLimit: limits how many rows a worker decodes at once after memory ran out. Pure; knows no decoder.

Memory runs out when many long samples are decoded together, which is temporary. So the limit is halved at once, and grows
again by an eighth after a number of steps at the limit without failure. Each further failure doubles that number of steps.
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
        """Note that memory ran out with `rows` rows."""
        self.rows = max(1, rows // 2)
        self._quiet, self._wanted = 0, min(2 * self._wanted, MOST_QUIET_STEPS)

    def stepped(self, rows: int) -> None:
        """Note a successful step with `rows` rows; steps below the limit don't count."""
        if self.rows is None or rows < self.rows:
            return
        self._quiet += 1
        if self._quiet >= self._wanted:
            self.rows, self._quiet = self.rows + max(1, self.rows // 8), 0

    def room(self, room: int, resident: int) -> int:
        """A decoder's room under this limit, given the number of `resident` rows."""
        return room if self.rows is None else min(room, self.rows - resident)
