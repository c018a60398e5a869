"""Metrics of one's own: a Python file with a function `measure(row)`. It runs in the worker's process, with its rights."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftmill.actors.metrics.base import MeasuredRow, RowByRow, Values
from draftmill.actors.metrics.settings import OwnMetric
from draftmill.storage.errors import UserError

FUNCTION = "measure"


def load_function(source: str, path: str, *, field: str) -> Callable[[Mapping[str, Any]], Any]:
    """The file's `measure`; UserError if the file raises an error or has no such function.

    The source travels with the job, so that every worker runs the same text, on other machines too.
    """
    with tempfile.TemporaryDirectory(prefix="draftmill-metric-") as folder:
        place = Path(folder) / Path(path).name
        place.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("draftmill_own_metric", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything
            raise UserError(f"{path} can't be loaded: {type(error).__name__}: {error}", field=field) from None
    found = getattr(module, FUNCTION, None)
    if not callable(found):
        raise UserError(f"{path} has no function {FUNCTION}(row)", field=field)
    return found


def own_metric(settings: OwnMetric, function: Callable[[Mapping[str, Any]], Any]) -> RowByRow:
    """A meter around a user's function."""
    keys = settings.own_columns()

    def measure(row: MeasuredRow) -> Values | None:
        answer = function(shown_row(row))
        if answer is None:
            return None
        if isinstance(answer, Mapping):
            unknown = sorted(set(answer) - set(keys))
            if unknown:
                raise ValueError(f"{FUNCTION} returned {unknown[0]!r}; the metric's `values` are {', '.join(keys)}")
            return tuple(_number(answer.get(key)) for key in keys)
        if len(keys) > 1:
            raise ValueError(f"{FUNCTION} returned one value, but the metric's `values` are {', '.join(keys)}")
        return (_number(answer),)

    return RowByRow(measure)


def shown_row(row: MeasuredRow) -> dict[str, Any]:
    """The row as a user's function gets it: the result's columns, with `reference`, `references` and `keep` added."""
    return dict(row.result) | {
        "sample": row.sample,
        "tokens": list(row.tokens),
        "keep": dict(row.values),
        "reference": row.references[0] if row.references else None,
        "references": list(row.references),
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{FUNCTION} returned NaN; return None where a row has no value")
    return number
