"""What a metric measures and gives: a row of results, and one value per column or an error."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

Values = tuple[float | None, ...]
"""One value per column of a metric; None where the row has no such value."""

Answer = Values | Exception | None
"""What a meter gives for a row: None if the row has no value, an exception if the metric failed on it."""

Measuring = Generator[None, None, list[Answer]]
"""A measurement in progress: it yields after each step, and returns one answer per row, in order."""


class RowTimeout(BaseException):
    """A metric takes too long on one row. No Exception: a metric that catches every Exception must end, too."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise RowTimeout in the block after `limit_s` seconds. For the main thread, where Python handles signals.

    Code that does not return to Python is not interrupted.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise RowTimeout(f"the metric took longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One sample that was decoded: `values` are the kept columns of its input, `result` is its whole result row.

    `references` is empty if the row has none. `tokens` are the generated (or scored) ids.
    """

    id: str
    sample: int
    text: str | None
    tokens: Sequence[int]
    references: tuple[str, ...]
    values: Mapping[str, Any]
    result: Mapping[str, Any]


class Meter(Protocol):
    """Measures rows."""

    def measure(self, rows: Sequence[MeasuredRow]) -> Measuring:
        """Measure rows step by step. Closing the generator stops the measurement."""
        ...


@dataclass(frozen=True, slots=True)
class RowByRow:
    """A meter whose rows are measured one after another, a row a step; an exception concerns its row alone."""

    measure_row: Callable[[MeasuredRow], Values | None]

    def measure(self, rows: Sequence[MeasuredRow]) -> Measuring:
        answers: list[Answer] = []
        for row in rows:
            answers.append(try_metric(self.measure_row, row))
            yield
        return answers


def try_metric(measure: Callable[[MeasuredRow], Values | None], row: MeasuredRow) -> Answer:
    """The error boundary of one row: libraries and files of users may raise anything but an interrupt."""
    try:
        return measure(row)
    except SystemExit as error:
        return RuntimeError(f"the metric ended its process: SystemExit({error})")
    except RowTimeout as error:
        return TimeoutError(*error.args)
    except Exception as error:  # noqa: BLE001 - see above
        return error


def reference_meter(compare: Callable[[str, Sequence[str]], Values]) -> RowByRow:
    """A meter that compares a text with its references; a row without either has no value."""

    def measure(row: MeasuredRow) -> Values | None:
        return compare(row.text, row.references) if row.text is not None and row.references else None

    return RowByRow(measure)
