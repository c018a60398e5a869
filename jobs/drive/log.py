"""What the loggers `draftmill.*` say, as lines: for people, or as JSON events with time, level, event, message, and facts such
as the unit and the worker. Secrets are removed from every text.

A command shows the records on stderr (`shown`). The library shows nothing: its user adds handlers, as for any other library. A
run's directory has a handler of its own (jobs/drive/run_log.py), which takes all of the run's events.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from draftmill.storage.secrets import presentable

RUN = logging.getLogger("draftmill.run")
"""The notes, events and progress of runs (jobs/drive/progress.py). Modules log under their own names."""

FACTS_ONLY = logging.DEBUG + 5
"""The level of an event without a message, which is for programs; in JSON it counts as info."""

FACTS: dict[str, Any] = {}
"""Facts in all further JSON lines of this process' streams, such as the run's name."""

LOST: dict[str, str] = {}
"""stdout and stderr once they can't be written any more, with the reasons."""


def event_record(
    event: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any
) -> logging.LogRecord:
    """An event of a run as a record without secrets, with the extra fields `event` and `facts`, which are JSON data."""
    extra = {"event": event, "facts": _without_secrets(facts)}
    text, shown = (event, FACTS_ONLY) if message is None else (presentable(message), level)
    return RUN.makeRecord(RUN.name, shown, __file__, 0, text, (), None, extra=extra)


def log_record(record: logging.LogRecord) -> None:
    """Log the record of a run, if its level is one that is logged."""
    if RUN.isEnabledFor(record.levelno):
        RUN.handle(record)


def _without_secrets(fact: Any) -> Any:
    match fact:
        case str():
            return presentable(fact)
        case dict():
            return {str(name): _without_secrets(inner) for name, inner in fact.items()}
        case list() | tuple():
            return [_without_secrets(inner) for inner in fact]
        case _:
            return fact


def now_text(seconds: float | None = None) -> str:
    """The time, or that of a time stamp, in ISO 8601, UTC, with milliseconds."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextLines(logging.Formatter):
    """Records for people. What is not of a run's progress begins with the program's name."""

    def format(self, record: logging.LogRecord) -> str:
        return ("" if record.name == RUN.name else "draftmill: ") + presentable(super().format(record))


class JsonLines(logging.Formatter):
    """Records as events, one line of JSON each, with `facts` in each; a record that is no event gets the name `other`."""

    def __init__(self, other: str, facts: dict[str, Any]) -> None:
        super().__init__()
        self._other, self._facts = other, facts

    def format(self, record: logging.LogRecord) -> str:
        event, message = getattr(record, "event", self._other), super().format(record)
        level = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}.get(record.levelno)
        head = {"time": now_text(record.created), "level": level or "info", "event": event}
        head |= {} if message == event else {"message": presentable(message)}
        facts = {name: fact for name, fact in getattr(record, "facts", {}).items() if fact is not None}
        return json.dumps(head | self._facts | facts, default=str, ensure_ascii=False)


class _ToStderr(logging.Handler):
    """Writes a record in one go, so that threads do not mix their lines, to what is stderr then: a live line replaces it."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        super().__init__(FACTS_ONLY if as_json else logging.INFO)
        self.as_json, self.quiet = as_json, quiet
        self.setFormatter(JsonLines("output", FACTS) if as_json else TextLines())

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, "event", None)
        return self.as_json if event == "ended" else event is None or not self.quiet  # people see an error, or a table

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:  # it was closed from the start
            return
        try:
            with unfailing("stderr"):
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)


_of_command: list[_ToStderr] = []
"""The handler of the command that runs; empty in the library."""


@contextmanager
def shown(*, as_json: bool = False, quiet: bool = False) -> Iterator[None]:
    """During the block, a command's, results are printed, and records are shown on stderr; with `quiet` not those of runs.

    They are draftmill's for people, or with `as_json` those of all libraries, as events.
    """
    handler, package = _ToStderr(as_json=as_json, quiet=quiet), logging.getLogger("draftmill")
    logger, level = logging.getLogger() if as_json else package, package.level
    LOST.clear()
    FACTS.clear()
    package.setLevel(handler.level)
    logger.addHandler(handler)
    logging.captureWarnings(as_json)
    _of_command.append(handler)
    try:
        yield
    finally:
        _of_command.remove(handler)
        logging.captureWarnings(False)
        logger.removeHandler(handler)
        package.setLevel(level)


def is_command() -> bool:
    """Whether a command runs; in the library nothing is printed."""
    return bool(_of_command)


def shows_progress() -> bool:
    """Whether a command shows how its runs get on."""
    return is_command() and not _of_command[-1].quiet


def has_terminal() -> bool:
    """Whether it does so at a terminal, for people."""
    return shows_progress() and not _of_command[-1].as_json and sys.stderr is not None and sys.stderr.isatty()


def print_result(text: str, end: str = "\n") -> None:
    """Print a command's result, as events if it shows those. Nobody's pipe and no full disk may end the work."""
    if not is_command():
        return
    if _of_command[-1].as_json:
        lines = (line for line in text.split("\n") if line.strip())
        records = (logging.LogRecord(RUN.name, logging.INFO, "", 0, line, (), None) for line in lines)
        text, end = "".join(f"{_of_command[-1].format(record)}\n" for record in records), ""
    with unfailing("stdout"):
        print(text, end=end, flush=True)


@contextmanager
def unfailing(name: str) -> Iterator[None]:
    """The block writes to stdout or stderr; if that fails, nothing more of the stream is shown, and the work goes on."""
    try:
        yield
    except OSError as error:
        LOST.setdefault(name, error.strerror or type(error).__name__)
        silence(getattr(sys, name))


def silence(stream: TextIO) -> None:
    """Show nothing more of this stream; nothing of it fails, not even what Python flushes at its end."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stream of a test may have no file
        os.dup2(nowhere.fileno(), stream.fileno())
