"""Builds the meter of a metric that is ready to run, and runs what is not ours: a model's programs (pass@k), a user's file.

Programs run in the sandbox; a file with a function `measure(row)` runs in the worker's process, with its rights.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftmill.actors.job import ModelPlace
from draftmill.actors.metrics import texts
from draftmill.actors.metrics.base import MeasuredRow, Meter, RowByRow, Stopping, Values, guarded
from draftmill.actors.metrics.settings import (
    PLACE,
    Bleu,
    Chrf,
    Distinct,
    EditSimilarity,
    Entropy,
    ExactMatch,
    Judge,
    Length,
    Metric,
    OwnMetric,
    PassAtK,
    Rouge,
)
from draftmill.actors.sandbox.sandbox import Kind, Limits, Sandbox, find_sandbox
from draftmill.storage.errors import UserError
from draftmill.storage.runs.metric_files import MeasuredMetric, pass_at_k
from draftmill.storage.stores.interface import S3Options


@dataclass(frozen=True, slots=True)
class ReadyMetric:
    """A metric that was checked: `measured` is its identity, `field` its place in the spec or on the command line.

    `source` is the text of a user's file, `place` a judge's model, `sandbox` where programs run, `samples` the number of samples
    of each row.
    """

    settings: Metric
    measured: MeasuredMetric
    field: str
    source: str | None = None
    place: ModelPlace | None = None
    sandbox: Kind | None = None
    samples: int | None = None


def build_meter(metric: ReadyMetric, *, threads: int, s3: S3Options) -> Meter:
    """The meter of a metric; a judge's model is loaded here."""
    match metric.settings:
        case ExactMatch() as settings:
            return texts.exact_match(settings)
        case EditSimilarity() as settings:
            return texts.edit_similarity(settings)
        case Distinct() as settings:
            return texts.distinct(settings)
        case Entropy() as settings:
            return texts.entropy(settings)
        case Length() as settings:
            return texts.length(settings)
        case Rouge() as settings:
            return texts.rouge(settings)
        case Bleu() as settings:
            return texts.bleu(settings)
        case Chrf() as settings:
            return texts.chrf(settings)
        case Judge() as settings:
            from draftmill.actors.metrics.judge import load_judge

            assert metric.place is not None
            return load_judge(metric.place, prompt=settings.prompt, max_rows=settings.max_rows, threads=threads, s3=s3)
        case PassAtK() as settings:
            assert metric.sandbox is not None
            find_sandbox(
                metric.sandbox, field=f"{metric.field}.sandbox"
            )  # this machine may be another than the driver's
            return Programs(settings, Sandbox(metric.sandbox), threads, metric.samples)
        case OwnMetric() as settings:
            assert metric.source is not None
            return own_metric(settings, load_function(metric.source, settings.path, field=metric.field))


# ---- pass@k

_FENCED: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs the programs of a unit, `threads` at a time. `samples` is the number of samples of each row, None if unknown."""

    settings: PassAtK
    sandbox: Sandbox
    threads: int = 1
    samples: int | None = None

    def measure(self, rows: Sequence[MeasuredRow], stopping: Callable[[], bool]) -> list[Values | Exception | None]:
        """A row's estimates have no value here if some of its samples are in another unit."""

        def one(row: MeasuredRow) -> Values | None:
            if stopping():
                raise Stopping
            return self._passed(row, stopping)

        with ThreadPoolExecutor(self.threads, thread_name_prefix="programs") as pool:
            found = list(pool.map(lambda row: guarded(one, row), rows))
        return self._with_estimates(rows, found)

    def _passed(self, row: MeasuredRow, stopping: Callable[[], bool]) -> Values | None:
        if row.text is None:
            return None
        settings = self.settings
        limits = Limits(timeout_s=settings.timeout_s, memory_mb=settings.memory_mb, processes=settings.processes)
        ran = self.sandbox.run(program_of(settings, row.text, row.values), limits, stopping=stopping)
        if ran.how == "timeout" and stopping():
            raise Stopping
        return (float(ran.passed),)

    def _with_estimates(
        self, rows: Sequence[MeasuredRow], found: list[Values | Exception | None]
    ) -> list[Values | Exception | None]:
        passed = [float(one[0] or 0.0) if isinstance(one, tuple) else None for one in found]
        counts = Counter(row.id for row, one in zip(rows, passed, strict=True) if one is not None)
        correct = Counter(row.id for row, one in zip(rows, passed, strict=True) if one)
        answers: list[Values | Exception | None] = []
        for row, one in zip(rows, found, strict=True):
            if not isinstance(one, tuple):
                answers.append(one)
                continue
            total = counts[row.id]
            is_whole = self.samples is None or total == self.samples
            estimates = (
                pass_at_k(total, correct[row.id], k) if is_whole and k <= total else None for k in self.settings.k
            )
            answers.append((*one, *estimates))
        return answers


def program_of(settings: PassAtK, text: str, values: Mapping[str, Any]) -> str:
    """The program of a sample: the template with its text and the kept columns of its row; lists are joined by line ends."""
    held = dict(values) | {"text": fenced(text) if settings.code == "fenced" else text}
    return PLACE.sub(lambda place: f"{{{place[1]}}}" if place[1] else _shown(held, place[2]), settings.program)


def fenced(text: str) -> str:
    """The content of the first fenced block of code, or the whole text if there is none."""
    found = _FENCED.search(text)
    return found[1] if found else text


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        raise ValueError(f"the row has no value in the kept column {name!r}")
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return str(value)


# ---- a user's file

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
