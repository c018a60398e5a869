"""Events as JSON lines, one each: time, level, run, name, message, and facts such as the unit and the worker.

The same form is printed with `--log json` and written into the run directory. Secrets are removed from every text.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from draftmill.storage.secrets import presentable

Level = Literal["info", "warning", "error"]


def event_line(event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> str:
    """The event as one line of JSON, without secrets, control characters and facts of None."""
    head: dict[str, Any] = {"time": now_text(), "level": level}
    rest = {"event": event, "message": message, **facts}
    known = {name: fact for name, fact in rest.items() if fact is not None}
    return json.dumps(
        head | {name: hide_secrets(fact) for name, fact in known.items()}, default=str, ensure_ascii=False
    )


def hide_secrets(fact: Any) -> Any:
    """A fact without secrets, also inside of lists and mappings."""
    match fact:
        case str():
            return presentable(fact)
        case dict():
            return {str(name): hide_secrets(inner) for name, inner in fact.items()}
        case list() | tuple():
            return [hide_secrets(inner) for inner in fact]
        case _:
            return fact


def now_text() -> str:
    """The time in ISO 8601, UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Stand(io.TextIOBase):
    """Stands for stdout or stderr; libraries may ask for the stream's file descriptor and encoding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the class says that it could be set
        return self._stream.encoding


class Unfailing(_Stand):
    """A stream for people: nobody's pipe and no full disk may end the work.

    After the first text that can't be written, nothing more is written; `lost` has the reason.
    """

    lost: str | None = None

    def write(self, text: str) -> int:
        """Print, if that is possible; whole lines at once, so that it is soon known whether they can be read."""
        self._try(lambda: self._stream.write(text))
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _try(self, printing: Callable[[], object]) -> None:
        if self.lost is not None:
            return
        try:
            printing()
        except OSError as error:
            self.lost = error.strerror or type(error).__name__
            silence(self._stream)


def silence(stream: TextIO) -> None:
    """From now on nothing of this stream is shown, and none of it fails, not even what Python flushes at its end."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stream of a test may have no file
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def unfailing_streams(*, out: bool) -> Iterator[None]:
    """During the block, stderr, and with `out` stdout, can't fail (see Unfailing)."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:  # for a stream that was closed before Python started
        sys.stderr = Unfailing(sys.stderr or nowhere)
        if out:
            sys.stdout = Unfailing(sys.stdout or nowhere)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, Unfailing):
                    stream.flush()
            sys.stdout, sys.stderr = before


def lost_streams() -> list[str]:
    """What is not shown any more, and why, one line for each stream."""
    reasons = {"stdout": getattr(sys.stdout, "lost", None), "stderr": getattr(sys.stderr, "lost", None)}
    return [f"{name} can't be written any more, the run goes on: {why}" for name, why in reasons.items() if why]


class JsonStream(_Stand):
    """A stream of which every printed line becomes the event `output`.

    `facts` are in each event of this stream, such as the run's name. Events that are made as such are written by `emit`.
    """

    def __init__(self, stream: TextIO, level: Level) -> None:
        super().__init__(stream)
        self._level = level
        self.facts: dict[str, Any] = {}
        self._begun = threading.local()  # threads print at the same time, each its own lines

    def write(self, text: str) -> int:
        """Print; whole lines become events, the rest waits for its end."""
        *lines, self._begun.text = (self._unended + text).split("\n")
        for line in lines:
            if line.strip():
                self.emit("output", line.rstrip(), level=self._level)
        return len(text)

    def emit(self, event: str, message: str | None = None, *, level: Level = "info", **facts: Any) -> None:
        """Write an event."""
        # One write: that of another thread must not come in between.
        self._stream.write(event_line(event, message, level=level, **(self.facts | facts)) + "\n")
        self._stream.flush()

    def flush(self) -> None:
        """Write what is begun only at its end; the stream itself is always flushed."""

    def end(self) -> None:
        """Write this thread's last line, if it has no end."""
        if self._unended:
            self.write("\n")

    @property
    def lost(self) -> str | None:
        """Why nothing more is shown (see Unfailing); None while it is."""
        return getattr(self._stream, "lost", None)

    @property
    def _unended(self) -> str:
        return getattr(self._begun, "text", "")

    def isatty(self) -> bool:
        return False


@contextmanager
def json_streams() -> Iterator[None]:
    """During the block, all that is printed to stdout and stderr is JSON lines."""
    before = sys.stdout, sys.stderr
    out, err = JsonStream(sys.stdout, "info"), JsonStream(sys.stderr, "warning")
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        out.end()
        err.end()


def say_in_events(**facts: Any) -> None:
    """Add facts to all further events on this process' streams, if these are JSON lines."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, JsonStream):
            stream.facts |= facts
