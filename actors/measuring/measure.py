"""The worker of `draftmill measure`: reads a finished unit, measures its rows, and writes the unit's file of metrics."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from draftmill.actors.metrics.base import MeasuredRow, Meter, Values
from draftmill.actors.metrics.registry import ReadyMetric, build_meter
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP, plain, to_json
from draftmill.storage.runs.metric_files import KEYS, MetricError, MetricSet, commit_metrics
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store

COLUMNS = ("id", "sample", "status", "text", "tokens", KEEP)
"""The result columns that metrics read; a user's file gets all columns."""


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What every worker needs to know, pickled once. Never holds credentials.

    `reference` is the kept column with the references, and `joiner` what joins a reference that is a list of sentences; with
    None a list holds several references.
    """

    store_url: str
    s3: S3Options
    fingerprint: str
    code_version: str
    metrics: tuple[ReadyMetric, ...]
    reference: str | None = None
    joiner: str | None = None


@dataclass(frozen=True, slots=True)
class UnitToMeasure:
    """One unit: its result file in the run's directory, and which of the job's metrics to measure."""

    pass_: int
    unit: int
    object: str
    rows: int
    metrics: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitMeasured:
    """A unit whose file of metrics is there; `errors` counts the rows that a metric failed on."""

    pass_: int
    unit: int
    object: str
    rows: int
    errors: int


@dataclass(slots=True)
class UnitMeasurer:
    """Measures units one after another. A judge is loaded once, with its first unit."""

    job: MeasureJob
    threads: int = 1
    _meters: dict[int, Meter] = field(default_factory=dict)

    def for_job(self, job: MeasureJob, threads: int) -> UnitMeasurer:
        """A measurer for another job. A judge that both jobs have stays loaded; all other meters are built for the job."""
        kept = {
            index: self._meters[before]
            for before in self._meters
            for index, metric in enumerate(job.metrics)
            if metric.place is not None and replace(metric, field="") == replace(self.job.metrics[before], field="")
        }
        return UnitMeasurer(job, threads, kept)

    def prepare(self, metrics: Sequence[int]) -> None:
        """Build these meters now, so that a model that can't be loaded shows before the first unit."""
        for index in metrics:
            self._meter(index)

    def measure(self, unit: UnitToMeasure, stopping: Callable[[], bool] = lambda: False) -> UnitMeasured:
        """Measure and write one unit. Raises draftmill.actors.metrics.base.Stopping if `stopping` becomes true."""
        failpoint("measure.unit")
        store = open_store(self.job.store_url, s3=self.job.s3)
        chosen = [self.job.metrics[index] for index in unit.metrics]
        needs_all = any(metric.source is not None for metric in chosen)
        [table] = read_results(store, objects=[unit.object], columns=None if needs_all else COLUMNS)
        rows = rows_of(table, self.job.reference, self.job.joiner)
        answers = [
            self._meter(index).measure([row for row in rows if row is not None], stopping) for index in unit.metrics
        ]
        metric_set = MetricSet(tuple(metric.measured for metric in chosen))
        keys = [(name, sample or 0) for name, sample in zip(*_keys(table), strict=True)]
        columns, errors = columns_of(chosen, rows, answers)
        failpoint("measure.measured")
        name = commit_metrics(
            store,
            unit=unit.unit,
            pass_=unit.pass_,
            metric_set=metric_set,
            table=table_of(keys, columns),
            fingerprint=self.job.fingerprint,
            code_version=self.job.code_version,
            errors=errors,
        )
        return UnitMeasured(unit.pass_, unit.unit, name, len(rows), len(errors))

    def _meter(self, index: int) -> Meter:
        if index not in self._meters:
            self._meters[index] = build_meter(self.job.metrics[index], threads=self.threads, s3=self.job.s3)
        return self._meters[index]


class MeasureWorker:
    """A Ray actor around a UnitMeasurer."""

    def __init__(self, job: MeasureJob, threads: int) -> None:
        self._measurer = UnitMeasurer(job, threads)
        self._measurer.prepare(range(len(job.metrics)))

    def where(self) -> tuple[str, int]:
        """Its node and process; answers when judges are loaded."""
        return socket.gethostname(), os.getpid()

    def take(self, job: MeasureJob, threads: int) -> tuple[str, int]:
        """Work for another job from now on; see UnitMeasurer.for_job and `where`."""
        self._measurer = self._measurer.for_job(job, threads)
        self._measurer.prepare(range(len(job.metrics)))
        return self.where()

    def measure(self, unit: UnitToMeasure) -> UnitMeasured:
        return self._measurer.measure(unit)


# ---- rows in


def rows_of(table: pa.Table, reference: str | None, joiner: str | None) -> list[MeasuredRow | None]:
    """The rows of a unit's results; None for a row that was not decoded."""
    kept = _kept(table)
    names, samples = _keys(table)
    found: list[MeasuredRow | None] = []
    for index, result in enumerate(table.to_pylist()):
        if result["status"] != "ok":
            found.append(None)
            continue
        values = kept[index] or {}
        result.pop(KEEP, None)
        found.append(
            MeasuredRow(
                id=names[index],
                sample=samples[index] or 0,
                text=result["text"],
                tokens=result["tokens"] or (),
                references=references_of(None if reference is None else values.get(reference), joiner),
                values=values,
                result=result,
            )
        )
    return found


def references_of(value: Any, joiner: str | None) -> tuple[str, ...]:
    """The references in a row's column: one text or number, or a list of them, which `joiner` makes one text of."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        texts = [_text(one) for one in value if one is not None]
        return tuple(texts) if joiner is None else (joiner.join(texts),)
    return (_text(value),)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(plain(value), ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _keys(table: pa.Table) -> tuple[list[str], list[int | None]]:
    samples = table["sample"].to_pylist() if "sample" in table.column_names else [None] * table.num_rows
    return table["id"].to_pylist(), samples


def _kept(table: pa.Table) -> list[Mapping[str, Any] | None]:
    if KEEP not in table.column_names:
        return [None] * table.num_rows
    schema = pa.schema(list(table.schema.field(KEEP).type))
    return [to_json(values, schema) for values in table[KEEP].to_pylist()]


# ---- columns out


def columns_of(
    metrics: Sequence[ReadyMetric],
    rows: Sequence[MeasuredRow | None],
    answers: Sequence[Sequence[Values | Exception | None]],
) -> tuple[dict[str, list[float | None]], list[MetricError]]:
    """Each metric's columns over all rows, and the errors; `answers` are of the rows that were decoded."""
    columns: dict[str, list[float | None]] = {}
    errors: list[MetricError] = []
    for metric, found in zip(metrics, answers, strict=True):
        names = metric.measured.columns
        columns |= {name: [] for name in names}
        answer = iter(found)
        for row in rows:
            one = None if row is None else next(answer)
            if row is not None and isinstance(one, Exception):
                message = " ".join(f"{type(one).__name__}: {one}".split())
                errors.append(MetricError(row.id, row.sample, metric.settings.shown, message))
            for index, name in enumerate(names):
                columns[name].append(one[index] if isinstance(one, tuple) else None)
    return columns, errors


def table_of(keys: Sequence[tuple[str, int]], columns: Mapping[str, Sequence[float | None]]) -> pa.Table:
    """The table of a unit's metrics."""
    schema = pa.schema([*KEYS, *(pa.field(name, pa.float64()) for name in columns)])
    named: dict[str, Any] = {"id": [name for name, _ in keys], "sample": [sample for _, sample in keys]} | dict(columns)
    return pa.table(named, schema=schema)
