"""The worker of `draftmill measure`: reads finished units, measures their rows, and writes each unit's file of metrics.

It takes units as a worker that decodes does, so that the same scheduler, driver and pools serve both. A unit's rows are here the
*values* to measure, the rows of the first metric before those of the second: a row whose metric ends the process is found, and
loses that metric alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.actors.faults import DeviceLostError, lost_device
from draftmill.actors.job import WorkerResources
from draftmill.actors.loop.runner import unit_failure
from draftmill.actors.loop.worker import Turns
from draftmill.actors.messages import Effort, Failure, Receipt, Tally, WorkUnit
from draftmill.actors.metrics.base import Answer, MeasuredRow, Measuring, Meter, RowByRow, time_limit
from draftmill.actors.metrics.registry import ReadyMetric, build_meter
from draftmill.decoders.base import EngineStats
from draftmill.storage.errors import RowError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP, plain, to_json
from draftmill.storage.runs.metric_files import KEYS, MetricError, MetricSet, commit_metrics
from draftmill.storage.runs.records import read_results
from draftmill.storage.runs.unit_facts import CommittedUnit, unit_name
from draftmill.storage.stores.store import Place, open_store

COLUMNS = ("id", "sample", "status", "text", "tokens", KEEP)
"""The result columns that metrics read; a user's file gets all columns."""


class UnitToMeasure(NamedTuple):
    """One unit: its result file in the run's directory, and which of the job's metrics to measure."""

    pass_: int
    unit: int
    object: str
    rows: int
    metrics: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What every worker needs to know, pickled once. Never holds credentials.

    `units` has the units by the number that the scheduler knows them by. `reference` is the kept column with the references, and
    `joiner` what joins a reference that is a list of sentences; with None a list holds several references. A metric has `row_s`
    seconds for a row.
    """

    store: Place
    fingerprint: str
    code_version: str
    metrics: tuple[ReadyMetric, ...]
    units: Mapping[int, UnitToMeasure]
    row_s: float
    reference: str | None = None
    joiner: str | None = None

    def on_ray(self, resources: WorkerResources) -> MeasureJob:
        """The job for an actor with these resources."""
        places = [metric.place and metric.place.on_ray(resources) for metric in self.metrics]
        pairs = zip(self.metrics, places, strict=True)
        return replace(self, metrics=tuple(replace(metric, place=place) for metric, place in pairs))


@dataclass(slots=True)
class Meters:
    """The meters of a job, by metric; judges stay loaded for the next job that has them."""

    _judges: list[tuple[ReadyMetric, Meter]] = field(default_factory=list)

    def build(self, job: MeasureJob, threads: int) -> dict[int, Meter]:
        """Build the meters that the job's units need. A judge that is loaded is used again; other judges are forgotten."""
        loaded = [(replace(metric, field=""), meter) for metric, meter in self._judges]
        lacking = sorted({index for unit in job.units.values() for index in unit.metrics})
        meters: dict[int, Meter] = {}
        for index in lacking:
            metric = job.metrics[index]
            same = (meter for known, meter in loaded if known == replace(metric, field=""))
            meters[index] = next(same, None) or build_meter(metric, threads=threads)
        self._judges = [
            (job.metrics[index], meter) for index, meter in meters.items() if job.metrics[index].place is not None
        ]
        return meters


@dataclass(slots=True, eq=False)
class MeasureRunner:
    """Measures the units that it holds one after another; has what Turns and the pools need of a UnitRunner."""

    job: MeasureJob
    meters: Mapping[int, Meter]
    worker: str
    node: str
    facts: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    _held: dict[int, tuple[WorkUnit, Generator[None, None, CommittedUnit | None]]] = field(default_factory=dict)
    _steps: int = 0

    @property
    def held(self) -> int:
        """Number of units held."""
        return len(self._held)

    @property
    def spent(self) -> tuple[int, ...]:
        """The lease of the unit in progress: the scheduler gives the next one ahead, so that the worker never waits."""
        return tuple(self._held)[:1]

    def add(self, unit: WorkUnit) -> None:
        self._held[unit.lease] = unit, self._measure_unit(unit)

    def drop(self, lease: int) -> None:
        """Give up a unit, if it is held."""
        if lease in self._held:
            self._held.pop(lease)[1].close()

    def close(self) -> None:
        """Give up all units."""
        for lease in list(self._held):
            self.drop(lease)

    def step(self) -> list[Receipt | Failure]:
        """Measure one more row of the oldest unit, or what its meter does in one step; returns the unit if that ends it."""
        lease, (unit, measuring) = next(iter(self._held.items()))
        try:
            next(measuring)
        except StopIteration as end:
            committed: CommittedUnit | None = end.value
            tally = Tally() if committed is None else Tally(rows=committed.rows, failed=committed.failed)
            answer: Receipt | Failure = Receipt(lease, unit.unit, self.worker, self.node, committed, tally)
        except Exception as error:  # noqa: BLE001 - a judge or a store may raise anything; it concerns this unit alone
            if lost_device(error):
                raise DeviceLostError(f"{type(error).__name__}: {error}") from None
            answer = unit_failure(unit, error, worker=self.worker, stage="measure")
        else:
            self._steps += 1
            return []
        del self._held[lease]
        return [answer]

    def take_effort(self) -> tuple[Effort, Tally]:
        """The steps since the last call, which count as tokens: the scheduler sees progress by them."""
        steps, self._steps = self._steps, 0
        return Effort(EngineStats(committed=steps)), Tally()

    def _measure_unit(self, unit: WorkUnit) -> Generator[None, None, CommittedUnit | None]:
        """Measure and write one unit. A probe measures its values and writes nothing; values with a verdict have its error."""
        failpoint("measure.unit")
        job, place = self.job, self.job.units[unit.unit]
        store = open_store(job.store)
        chosen = [job.metrics[index] for index in place.metrics]
        needs_all = any(metric.source is not None for metric in chosen)
        [table] = read_results(store, objects=[place.object], columns=None if needs_all else COLUMNS)
        rows = rows_of(table, job.reference, job.joiner)
        verdicts = {
            value: RowError(verdict.kind, verdict.stage, verdict.message)
            for verdict in unit.verdicts
            for value in range(verdict.start, verdict.stop)
        }
        answers: list[dict[int, Answer]] = []
        for first, index in zip(range(0, unit.rows, place.rows), place.metrics, strict=True):
            given_up: dict[int, Answer] = {
                row: verdicts[first + row] for row in range(len(rows)) if first + row in verdicts
            }
            wanted = range(max(0, unit.start - first), min(place.rows, unit.stop - first))
            measured = yield from self._measure_rows(index, rows, [row for row in wanted if row not in given_up])
            answers.append(given_up | measured)
        if unit.probe:
            return None
        columns, errors = columns_of(chosen, rows, answers)
        schema = pa.schema([*KEYS, *(pa.field(name, pa.float64()) for name in columns)])
        keys = {"id": table["id"], "sample": pc.fill_null(table["sample"], 0)}
        failpoint("measure.measured")
        commit_metrics(
            store,
            unit=place.unit,
            pass_=place.pass_,
            metric_set=MetricSet(tuple(metric.measured for metric in chosen)),
            table=pa.table(keys | columns, schema=schema),
            fingerprint=job.fingerprint,
            code_version=job.code_version,
            errors=errors,
        )
        failed, no_file = len(errors), bytes(32).hex()  # the driver needs the counts only
        return CommittedUnit(unit.unit, unit_name(unit.unit), "", len(rows), len(rows) - failed, failed, 0, 0, no_file)

    def _measure_rows(
        self, index: int, rows: Sequence[MeasuredRow | None], wanted: Collection[int]
    ) -> Generator[None, None, dict[int, Answer]]:
        decoded = {place: row for place in wanted if (row := rows[place]) is not None}
        meter = self.meters[index]
        with closing(meter.measure(list(decoded.values()))) as measuring:
            answers = yield from self._limit_rows(measuring) if isinstance(meter, RowByRow) else measuring
        return dict(zip(decoded, answers, strict=True))

    def _limit_rows(self, measuring: Measuring) -> Measuring:
        while True:
            try:
                with time_limit(self.job.row_s):
                    next(measuring)
            except StopIteration as end:
                answers: list[Answer] = end.value
                return answers
            yield


class MeasureWorker(Turns):
    """A Ray actor around a MeasureRunner; after `rest` it begins another job, with the judges that both jobs have."""

    def __init__(self, name: str, job: MeasureJob, threads: int, gpus: float = 1.0) -> None:
        self._meters = Meters()
        self.begin(name, job, threads, gpus)

    def _build(self, job: Any, *, name: str, node: str, threads: int, gpus: float) -> MeasureRunner:
        return measure_runner(job, name=name, node=node, threads=threads, meters=self._meters)


def measure_runner(job: MeasureJob, *, name: str, node: str, threads: int, meters: Meters) -> MeasureRunner:
    """A runner with the job's judges loaded. Raises UserError or ValueError if one can't be."""
    return MeasureRunner(job, meters.build(job, threads), name, node)


# ---- rows in


def rows_of(table: pa.Table, reference: str | None, joiner: str | None) -> list[MeasuredRow | None]:
    """The rows of a unit's results; None for a row that was not decoded."""
    keep = pa.schema(list(table.schema.field(KEEP).type) if KEEP in table.column_names else [])
    rows: list[MeasuredRow | None] = []
    for result in table.to_pylist():
        if result["status"] != "ok":
            rows.append(None)
            continue
        values = to_json(result.pop(KEEP, None), keep) or {}
        rows.append(
            MeasuredRow(
                id=result["id"],
                sample=result["sample"] or 0,
                text=result["text"],
                tokens=result["tokens"] or (),
                references=references_of(None if reference is None else values.get(reference), joiner),
                values=values,
                result=result,
            )
        )
    return rows


def references_of(value: Any, joiner: str | None) -> tuple[str, ...]:
    """The references in a row's column: one text or number, or a list of them, which `joiner` makes one text of."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        texts = [_text(item) for item in value if item is not None]
        return tuple(texts) if joiner is None else (joiner.join(texts),)
    return (_text(value),)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(plain(value), ensure_ascii=False) if isinstance(value, dict | list) else str(value)


# ---- columns out


def columns_of(
    metrics: Sequence[ReadyMetric], rows: Sequence[MeasuredRow | None], answers: Sequence[Mapping[int, Answer]]
) -> tuple[dict[str, list[float | None]], list[MetricError]]:
    """Each metric's columns over all rows, and the errors; `answers` has each metric's answers by the place of the row."""
    columns: dict[str, list[float | None]] = {}
    errors: list[MetricError] = []
    for metric, of_rows in zip(metrics, answers, strict=True):
        names = metric.measured.columns
        columns |= {name: [] for name in names}
        for place, row in enumerate(rows):
            answer = of_rows.get(place)
            if row is not None and isinstance(answer, Exception):
                message = " ".join(f"{type(answer).__name__}: {answer}".split())
                errors.append(MetricError(row.id, row.sample, metric.settings.shown, message))
            for index, name in enumerate(names):
                columns[name].append(answer[index] if isinstance(answer, tuple) else None)
    return columns, errors
