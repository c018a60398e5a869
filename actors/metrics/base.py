"""What a metric measures and gives: a row of results, and one value per column or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Values = tuple[float | None, ...]
"""One value per column of a metric; None where the row has no such value."""


class Stopping(Exception):
    """The measurement was interrupted before its end."""


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
    """Measures rows; `None` as a row's answer means that it has no value, an exception that the metric failed on it."""

    def measure(self, rows: Sequence[MeasuredRow], stopping: Callable[[], bool]) -> list[Values | Exception | None]:
        """One answer per row, in order. Raises Stopping if `stopping` becomes true."""
        ...


@dataclass(frozen=True, slots=True)
class RowByRow:
    """A meter whose rows are measured one after another; an exception concerns its row alone."""

    measure_row: Callable[[MeasuredRow], Values | None]

    def measure(self, rows: Sequence[MeasuredRow], stopping: Callable[[], bool]) -> list[Values | Exception | None]:
        answers: list[Values | Exception | None] = []
        for row in rows:
            if stopping():
                raise Stopping
            answers.append(try_metric(self.measure_row, row))
        return answers


def try_metric(measure: Callable[[MeasuredRow], Values | None], row: MeasuredRow) -> Values | Exception | None:
    """The error boundary of one row: libraries and files of users may raise anything but an interrupt."""
    try:
        return measure(row)
    except Stopping:
        raise
    except SystemExit as error:
        return RuntimeError(f"the metric ended its process: SystemExit({error})")
    except Exception as error:  # noqa: BLE001 - see above
        return error


def reference_meter(compare: Callable[[str, Sequence[str]], Values]) -> RowByRow:
    """A meter that compares a text with its references; a row without either has no value."""

    def measure(row: MeasuredRow) -> Values | None:
        return compare(row.text, row.references) if row.text is not None and row.references else None

    return RowByRow(measure)
