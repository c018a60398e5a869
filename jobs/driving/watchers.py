"""What looks on while the driver works: metrics, the stall notice, the estimate. A watcher decides nothing and ends no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from draftmill.actors.messages import Failure, Receipt, TurnReport
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.schedule.scheduler import Scheduler


class Watcher:
    """Hears what the driver hears. Each method must return at once; by default it does nothing."""

    name = "watcher"

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        """Called after each poll of the workers, some times a second."""

    def reported(self, worker: str, report: TurnReport) -> None:
        """A worker reports a turn."""

    def committed(self, receipt: Receipt) -> None:
        """A unit was committed, for the first time."""

    def failed(self, failure: Failure) -> None:
        """A unit failed on a worker that survived."""

    def died(self, worker: str) -> None:
        """A worker died or was killed."""

    def over(self, totals: Totals, scheduler: Scheduler) -> None:
        """The driver's loop has ended."""


class Watchers:
    """Tells several watchers; one that raises is told nothing more, and the run goes on."""

    def __init__(self, watchers: Sequence[Watcher] = (), *, note: Callable[[str], None] = lambda message: None) -> None:
        self._watchers = list(watchers)
        self._note = note

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.look(totals, scheduler)

    def reported(self, worker: str, report: TurnReport) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.reported(worker, report)

    def committed(self, receipt: Receipt) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.committed(receipt)

    def failed(self, failure: Failure) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.failed(failure)

    def died(self, worker: str) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.died(worker)

    def over(self, totals: Totals, scheduler: Scheduler) -> None:
        """See Watcher."""
        for watcher in self._each():
            with self._guarded(watcher):
                watcher.over(totals, scheduler)

    def _each(self) -> Iterator[Watcher]:
        return iter(list(self._watchers))

    @contextmanager
    def _guarded(self, watcher: Watcher) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with watching, the run goes on
            self._watchers.remove(watcher)
            self._note(f"{watcher.name} end here, the run goes on: {type(error).__name__}: {error}")
