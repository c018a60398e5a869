"""How many workers are wanted, and when asking for more is of no use. Counts only; jobs/schedule/scheduler.py acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.schedule.unit_leases import Limits


@dataclass(slots=True)
class Staffing:
    """`wanted` workers, and what speaks against it: failed starts, and deaths of workers without a success in between."""

    limits: Limits
    wanted: int
    failed_starts: int = 0
    deaths_in_a_row: int = 0

    def came_up(self) -> None:
        """A worker is up."""
        self.failed_starts = 0

    def worked(self) -> None:
        """A unit or a probe has ended."""
        self.deaths_in_a_row = 0

    def lost(self, *, was_up: bool, left: int) -> str:
        """A worker died, or did not come up; `left` are up and stay. Returns why the job can't go on, empty where it can."""
        self.deaths_in_a_row += was_up
        self.failed_starts += not was_up
        if self.failed_starts >= self.limits.starts * self.wanted:
            # A device or machine that is no good must not end a job that goes on without it.
            self.failed_starts, self.wanted = 0, left
            return "" if left else "workers can't start"
        hopeless = self.deaths_in_a_row >= max(self.limits.fruitless, 3 * self.wanted)
        return "workers keep dying" if hopeless else ""
