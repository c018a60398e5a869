"""The driver's log in the run directory, RUN/log/*.jsonl: what it told the user, and how far it was. Best effort.

Units and workers are in the attempts log (jobs/driving/attempts.py); `draftmill logs` prints both in the order of time. Nothing
is written before the log is attached, so that a run that is refused leaves no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from draftmill.jobs.driving.events import Level, event_line, lost_streams
from draftmill.jobs.driving.line_files import LineFiles
from draftmill.jobs.driving.progress import Display, progress_facts
from draftmill.jobs.driving.totals import Totals
from draftmill.storage.errors import StoreError
from draftmill.storage.stores.interface import Store

FLUSH_EVERY_S = 10.0
PROGRESS_EVERY_S = 60.0


class DriverLog:
    """Collects events; once attached to a run, writes them every FLUSH_EVERY_S seconds and at the end."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._early: list[str] = []
        self._files: LineFiles | None = None
        self._run: str | None = None
        self._flushed_s = self._progress_s = clock()
        self._lost: set[str] = set()

    def add(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        """Add an event."""
        line = event_line(event, message, level=level, run=self._run, **facts)
        if self._files is None:
            self._early.append(line)
        else:
            self._files.add(line)

    def attach(self, store: Store, epoch: int, run: str) -> None:
        """Write from now on into this run directory, as the driver with this epoch; what was said before goes there too."""
        self._files, self._run = LineFiles(store, f"log/epoch-{epoch:04d}"), run
        for line in self._early:
            self._files.add(line)
        self._early.clear()

    @property
    def is_attached(self) -> bool:
        """Whether it belongs to a run: from then on the run directory is not what it was before."""
        return self._files is not None

    def show(self, totals: Totals) -> None:
        """Note the progress every PROGRESS_EVERY_S seconds, and flush every FLUSH_EVERY_S."""
        if self._clock() - self._progress_s >= PROGRESS_EVERY_S:
            self._progress_s = self._clock()
            self.add("progress", **progress_facts(totals))
        if self._clock() - self._flushed_s >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write new events, if the log is attached and the store can be written."""
        self._flushed_s = self._clock()
        for message in lost_streams():
            if message not in self._lost:
                self._lost.add(message)
                self.add("note", message, level="warning")
        if self._files is not None:
            try:
                self._files.flush()
            except StoreError:
                return  # best effort: the results don't depend on the log


class LoggedDisplay:
    """A display whose notes and progress are in the driver's log too."""

    def __init__(self, display: Display, log: DriverLog) -> None:
        self._display, self._log = display, log

    @property
    def heading(self) -> str:
        """See Display."""
        return self._display.heading

    @heading.setter
    def heading(self, text: str) -> None:
        self._display.heading = text

    def __enter__(self) -> LoggedDisplay:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def note(self, message: str) -> None:
        """See Display."""
        self._log.add("note", message)
        self._display.note(message)

    def event(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        """See Display; the attempts log has the events of units and workers."""
        self._display.event(event, message, level=level, **facts)

    def step(self, what: str, done: int, total: int) -> None:
        """See Display."""
        self._display.step(what, done, total)

    def show(self, totals: Totals) -> None:
        """See Display."""
        self._log.show(totals)
        self._display.show(totals)

    def line(self, share: float, text: str) -> None:
        """See Display."""
        self._display.line(share, text)
