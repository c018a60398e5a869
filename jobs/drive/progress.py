"""Progress display of a running job: a live line on a terminal, lines in a pipe or as JSON, nothing with --quiet.

Everything goes to stderr; stdout is reserved for results. Reads Totals; does not compute them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftmill.jobs.drive.events import JsonStream, Level
from draftmill.jobs.drive.totals import Totals, ratio
from draftmill.jobs.formatting import Notes, counted, duration, rate_text, size_text
from draftmill.storage.secrets import presentable

LINE_EVERY_S = 30.0
FIRST_EVERY_S = 5.0
"""Seconds between two lines in the first FIRST_S of the display, and of decoding."""
FIRST_S = 60.0
BAR = 16
"""Width of the bar in characters."""


class Display(Notes):
    """A place to show progress, here nowhere; used as a context manager. `heading` begins every line of progress."""

    heading: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        """Tell what has happened to a unit or a worker; a display for people shows the message, if there is one."""
        if message is not None:
            self.note(message)

    def show(self, totals: Totals) -> None:
        """Show the current totals; may be called often."""

    def line(self, share: float, text: str) -> None:
        """Show a line of figures, and which share of the work is done; may be called often."""


def make_display(*, quiet: bool, stream: TextIO | None = None) -> Display:
    """The display for `stream` (default stderr)."""
    stream = stream or sys.stderr
    if quiet:
        return Silence()
    if isinstance(stream, JsonStream):
        return EventDisplay(stream)
    return LiveLine(stream) if stream.isatty() else LineDisplay(stream)


class Silence(Display):
    """Shows nothing."""


class FiguresOnly(Display):
    """Another display's progress and warnings, without its notes: for calls in a notebook that decode a few prompts."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)

    def event(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        if level != "info":
            self._display.event(event, message, level=level, **facts)

    def show(self, totals: Totals) -> None:
        self._display.show(totals)


class LineDisplay(Display):
    """One line every LINE_EVERY_S seconds, at first every FIRST_EVERY_S, for logs."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began_s = self._last_s = clock()
        self._decoding_s: float | None = None

    def _is_due(self, *, decoding: bool = False) -> bool:
        """Whether it is time for another line; `decoding` starts the first minute of decoding."""
        now_s = self._clock()
        if decoding and self._decoding_s is None:
            self._decoding_s = now_s
        is_first = now_s - max(self._began_s, self._decoding_s or -math.inf) < FIRST_S
        if now_s - self._last_s < (FIRST_EVERY_S if is_first else LINE_EVERY_S):
            return False
        self._last_s = now_s
        return True

    def show(self, totals: Totals) -> None:
        if self._is_due(decoding=totals.started_s is not None):
            self.note(self.heading + progress_line(totals))

    def line(self, share: float, text: str) -> None:
        if self._is_due():
            self.note(text)

    def note(self, message: str) -> None:
        # One write: Ray starts in a thread of its own, and `print` would let its notes in between a line and its end.
        self._stream.write(f"{presentable(message)}\n")
        self._stream.flush()

    def step(self, what: str, done: int, total: int) -> None:
        if self._is_due():
            self.note(f"{what}: {size_text(done)} of {size_text(total)}")


class EventDisplay(LineDisplay):
    """Events as JSON lines (`--log json`), and some with the progress, as often as LineDisplay has them."""

    def __init__(self, stream: JsonStream, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock=clock)  # type: ignore[arg-type]  # it has the methods that are used
        self._events = stream

    def show(self, totals: Totals) -> None:
        if self._is_due(decoding=totals.started_s is not None):
            self._events.emit("progress", self.heading + progress_line(totals), **progress_facts(totals))

    def note(self, message: str) -> None:
        self._events.emit("note", message)

    def event(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        self._events.emit(event, message, level=level, **facts)


class LiveLine(Display):
    """A bar and the figures, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, totals: Totals) -> None:
        self._bar(ratio(totals.rows_done, totals.rows), self.heading + progress_line(totals))

    def line(self, share: float, text: str) -> None:
        self._bar(share, text)

    def step(self, what: str, done: int, total: int) -> None:
        self._bar(ratio(done, total), f"{what}: {size_text(done)} of {size_text(total)}")

    def _bar(self, share: float, line: str) -> None:
        filled = min(BAR, int(BAR * share))
        bar = ("█" * filled, "green"), ("░" * (BAR - filled), "dim")
        self._live.update(Text.assemble(*bar, " ", line, no_wrap=True, overflow="ellipsis"))

    def note(self, message: str) -> None:
        self._console.print(Text(presentable(message)))


def progress_line(totals: Totals) -> str:
    """Samples, tokens per second, NFE per token, errors, workers and the remaining time, in one line."""
    decoded = totals.decoded
    parts = [
        f"{totals.rows_done:,}/{totals.rows:,} samples ({ratio(totals.rows_done, totals.rows):.0%})",
        f"{rate_text(totals.tokens_per_s)} tokens/s",
        f"{ratio(decoded.nfe, decoded.new_tokens):.3f} NFE/token" if decoded.new_tokens else "- NFE/token",
        f"{max(decoded.failed, totals.committed.failed):,} errors",
        workers_text(totals),
        f"ETA {duration(totals.eta_s)}" if totals.eta_s is not None else "ETA -",
    ]
    return "  ".join(parts)


def progress_facts(totals: Totals) -> dict[str, Any]:
    """The figures of the progress display, as data."""
    decoded = totals.decoded
    return {
        "samples_done": totals.rows_done,
        "samples": totals.rows,
        "tokens": totals.tokens,
        "tokens_per_s": round(totals.tokens_per_s, 3),
        "nfe_per_token": round(ratio(decoded.nfe, decoded.new_tokens), 4) if decoded.new_tokens else None,
        "errors": max(decoded.failed, totals.committed.failed),
        "workers": totals.workers,
        "loading": totals.loading,
        "eta_s": None if totals.eta_s is None else round(totals.eta_s, 1),
    }


def workers_text(totals: Totals) -> str:
    """The number of workers; before the first one is up, the number that load the model."""
    if not totals.workers and totals.loading:
        return f"{counted(totals.loading, 'worker')} {'loads' if totals.loading == 1 else 'load'} the model"
    return counted(totals.workers, "worker")
