"""How many workers the job needs, and when to stop starting more. Counts only; jobs/schedule/scheduler.py acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.jobs.schedule.unit_leases import Limits


@dataclass(slots=True)
class Staffing:
    """`wanted` workers, and the reasons to give up: failed starts, and worker deaths without a success in between."""

    limits: Limits
    wanted: int
    failed_starts: int = 0
    deaths_in_a_row: int = 0

    def came_up(self) -> None:
        """Note that a worker is up."""
        self.failed_starts = 0

    def worked(self) -> None:
        """Note that a unit or a probe succeeded."""
        self.deaths_in_a_row = 0

    def lost(self, *, was_up: bool, left: int) -> str:
        """Note a worker that died or did not come up; `left` others are up. Returns why the job can't continue, or ""."""
        self.deaths_in_a_row += was_up
        self.failed_starts += not was_up
        if self.failed_starts >= self.limits.starts * self.wanted:
            # A bad device or machine must not end a job that can continue without it.
            self.failed_starts, self.wanted = 0, left
            return "" if left else "workers can't start"
        hopeless = self.deaths_in_a_row >= max(self.limits.fruitless, 3 * self.wanted)
        return "workers keep dying" if hopeless else ""
