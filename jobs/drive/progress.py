"""Notes, events and progress of a running job: records of the logger `draftmill.run`, and a live line on a terminal.

Reads Totals; does not compute them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftmill.jobs.drive.log import event_record, has_terminal, log_record, unfailing
from draftmill.jobs.drive.run_log import RunLog
from draftmill.jobs.drive.totals import Totals, progress_facts, progress_line, ratio
from draftmill.jobs.formatting import Notes, size_text

LINE_EVERY_S = 30.0
FIRST_EVERY_S = 5.0
"""Seconds between two lines in the first FIRST_S of the display, and of decoding."""
FIRST_S = 60.0
BAR = 16
"""Width of the bar in characters."""


class Display(Notes):
    """Takes notes, events and figures, for the logger and for `log`, that of the present run.

    Inside `with`, a command at a terminal has the figures as a live line; else they are logged now and then. `heading` begins
    each line of a run's figures.
    """

    heading = ""

    def __init__(self, log: RunLog | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.log, self._clock = RunLog() if log is None else log, clock
        self._live: LiveLine | None = None
        self._began_s = self._last_s = clock()
        self._decoding_s: float | None = None

    def __enter__(self) -> Self:
        if has_terminal():
            self._live = LiveLine()
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, message: str) -> None:
        self.event("note", message)

    def event(self, event: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        """Log what has happened to a unit or a worker; people see the message, if there is one."""
        record = event_record(event, message, level=level, **facts)
        self.log.handle(record)
        log_record(record)

    def show(self, totals: Totals) -> None:
        """Show the current totals; may be called often."""
        self.log.show(totals)
        if self._decoding_s is None and totals.started_s is not None:
            self._decoding_s = self._clock()
        if self._is_due():
            share, text = ratio(totals.rows_done, totals.rows), self.heading + progress_line(totals)
            self._figures(share, "progress", text, **progress_facts(totals))

    def line(self, share: float, text: str) -> None:
        """Show a line of figures, and which share of the work is done; may be called often."""
        if self._is_due():
            self._figures(share, "note", text)

    def step(self, what: str, done: int, total: int) -> None:
        self.line(ratio(done, total), f"{what}: {size_text(done)} of {size_text(total)}")

    def _figures(self, share: float, event: str, text: str, **facts: Any) -> None:
        if self._live is not None:
            self._live.draw(share, text)
        else:
            log_record(event_record(event, text, **facts))

    def _is_due(self) -> bool:
        """Whether it is time for figures: every LINE_EVERY_S seconds, at first every FIRST_EVERY_S; in a live line always."""
        if self._live is not None:
            return True
        now_s = self._clock()
        is_first = now_s - (self._decoding_s or self._began_s) < FIRST_S
        if now_s - self._last_s < (FIRST_EVERY_S if is_first else LINE_EVERY_S):
            return False
        self._last_s = now_s
        return True


class LiveLine(Live):
    """A bar and figures, redrawn in place on stderr, below what is printed meanwhile. A terminal that is gone ends no run."""

    def __init__(self) -> None:
        super().__init__(Text("starting"), console=Console(stderr=True), refresh_per_second=4, transient=True)

    def draw(self, share: float, text: str) -> None:
        """Show another share and text, at the next refresh."""
        filled = min(BAR, int(BAR * share))
        bar = ("█" * filled, "green"), ("░" * (BAR - filled), "dim")
        self.update(Text.assemble(*bar, " ", text, no_wrap=True, overflow="ellipsis"))

    def start(self, refresh: bool = False) -> None:
        with unfailing("stderr"):
            super().start(refresh)

    def refresh(self) -> None:
        with unfailing("stderr"):
            super().refresh()

    def stop(self) -> None:
        with unfailing("stderr"):
            super().stop()
