"""Measures the units of a run that lack some of the wanted metrics; resumable and exactly once.

metrics, checked -> units without them -> sets recorded -> scheduler, driver and workers of a run -> one file per unit and set

Packages, files, judges, the sandbox and the columns of the results are checked before any unit is measured.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from draftmill.actors.checkpoints.models import fetch_model, model_hash, tokenizer_hash, user_error
from draftmill.actors.job import Allocation, ModelPlace
from draftmill.actors.measuring.measure import MeasureJob, UnitToMeasure
from draftmill.actors.metrics.registry import ReadyMetric, load_function
from draftmill.actors.metrics.settings import (
    Judge,
    Metric,
    Metrics,
    OwnMetric,
    PassAtK,
    as_mapping,
    expand_metrics,
    needs_reference,
)
from draftmill.actors.metrics.texts import PACKAGES
from draftmill.actors.rows.text import has_tokenizer
from draftmill.actors.sandbox.sandbox import find_sandbox
from draftmill.jobs.config.errors import spec_error
from draftmill.jobs.config.paths import absolute, with_absolute
from draftmill.jobs.config.rules import metric_problem, reference_of
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.backend import Backend
from draftmill.jobs.drive.driver import Driver, StopFlag, raise_unfinished
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.totals import Totals, ratio
from draftmill.jobs.formatting import counted, duration
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.resolve import limits_of
from draftmill.jobs.results.passes import finished_passes, passes_of
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.errors import UserError
from draftmill.storage.runs.metric_files import MeasuredMetric, MetricSet, measured_units, metric_sets, record_set
from draftmill.storage.stores.store import Store
from draftmill.version import __version__


class _Given(BaseModel):
    metrics: Metrics


def parse_metric(word: str, *, allow_code_execution: bool) -> Metric:
    """A metric from the command line: a name, a Python file, or a mapping in YAML. UserError if it is none."""
    field = f"--metric {word}"
    try:
        given = yaml.safe_load(word) if word.lstrip().startswith("{") else word
    except (yaml.YAMLError, ValueError) as error:  # of a date that does not exist, a number of thousands of digits
        raise UserError(f"not a mapping in YAML: {' '.join(str(error).split())}", field=field) from None
    if allow_code_execution:  # a name stands for a mapping
        with suppress(ValueError):
            given = as_mapping(given, "metric")
            given = {"allow_code_execution": True} | given if given["kind"] == "pass_at_k" else given
    data = {"metrics": [given]}
    try:
        [metric] = _Given.model_validate(data, strict=True).metrics
        return metric
    except ValidationError as error:
        problem = spec_error(_Given, data, error)
    text = str(problem).replace(" under metrics.0", "").replace("metrics.0.", "").removeprefix("metrics.0: ")
    raise UserError("; ".join(text.splitlines()), field=field)


@dataclass(frozen=True, slots=True)
class CheckedMetrics:
    """Metrics that can be measured for a job; `reference` and `joiner` as in draftmill.actors.measuring.measure.MeasureJob."""

    spec: JobSpec
    metrics: tuple[ReadyMetric, ...]
    reference: str | None
    joiner: str | None


def ready_for(spec: JobSpec, plan: Plan | None) -> CheckedMetrics | None:
    """The spec's metrics, checked before anything is decoded; None if it has none."""
    if not spec.metrics:
        return None
    fields = [f"metrics.{index}" for index in range(len(spec.metrics))]
    return ready_metrics(spec.metrics, fields, spec, spec.kept if plan is None else kept_columns(plan))


def ready_metrics(
    metrics: Sequence[Metric],
    fields: Sequence[str],
    spec: JobSpec,
    kept: Sequence[str],
    *,
    reference: str | None = None,
) -> CheckedMetrics:
    """Check metrics against a job whose results keep the columns `kept`; UserError, with the path, if one can't be measured.

    `fields` are the metrics' paths in the spec or their words on the command line; `reference` names another kept column.
    """
    if reference is not None and reference not in kept:
        there = ", ".join(kept) or "none"
        raise UserError(
            f"the results keep no column {reference!r}; columns in the results: {there}", field="--reference"
        )
    column, joiner = reference_of(spec.input.columns, spec.task, kept, spec.prompt, reference)
    problem = metric_problem(spec, metrics, fields, kept=kept, has_reference=column is not None)
    if problem is not None:
        raise UserError(problem[1], field=problem[0])
    checked = [_check_metric(metric, field, spec) for metric, field in zip(metrics, fields, strict=True)]
    ready = []
    for index, part in expand_metrics(metrics):
        hashes, more = checked[index]
        settings = part.model_dump(mode="json", exclude=set(part.changes_nothing)) | hashes
        if needs_reference(part):
            settings["reference"] = [column, joiner]
        ready.append(
            ReadyMetric(part, MeasuredMetric(settings, part.columns(), part.estimates()), fields[index], **more)
        )
    return CheckedMetrics(spec, tuple(ready), column, joiner)


def kept_columns(plan: Plan) -> tuple[str, ...]:
    """The columns of the inputs that the run's results hold."""
    return () if plan.keep is None else tuple(plan.keep.names)


def _check_metric(metric: Metric, field: str, spec: JobSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """What else decides the metric's values (hashes), and the fields of its ReadyMetric; UserError if it can't be measured."""
    package = PACKAGES.get(metric.kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(f"{metric.kind} needs {package}: pip install 'draftmill[metrics]'", field=field)
    match metric:
        case OwnMetric():
            try:
                source = Path(metric.path).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{metric.path} can't be read: {error}", field=field) from None
            load_function(source, metric.path, field=field)
            return {"sha256": hashlib.sha256(source.encode()).hexdigest()}, {"source": source}
        case Judge():
            return _judge(metric, field, spec)
        case PassAtK():
            find_sandbox(field=field)
            return {}, {"samples": spec.sampling.n}
    return {}, {}


def _judge(metric: Judge, field: str, spec: JobSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    from draftmill.decoders.backbones.checkpoint import inspect_model

    place = f"{field}.model"
    folder = fetch_model(spec.place(metric.model), metric.revision, field=place)
    try:
        info = inspect_model(folder)
    except ValueError as error:
        unusable = user_error(error, place)
        raise UserError(unusable.message, field=place) from None
    if info.kind != "causal":
        raise UserError(f"{metric.model} is of family {info.family!r}; allowed: causal models", field=place)
    if not has_tokenizer(folder):
        raise UserError(f"{metric.model} has no tokenizer, which texts need", field=place)
    checkpoint = spec.place(with_absolute(metric).model)
    model = ModelPlace(checkpoint, metric.revision, "auto", None, "auto", metric.dtype, spec.model.device, False)
    hashes = {"model_sha256": model_hash(folder), "tokenizer_sha256": tokenizer_hash(folder)}
    return hashes, {"place": model}


MARGIN_S = 30.0
"""Seconds beyond the time limit of a row after which a worker that can't interrupt its metric is killed."""


class MeasureDisplay(Display):
    """Shows samples where a run shows tokens; of the events it shows the messages, as notes."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def event(self, event: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        if event == "quarantined":  # the rows of a unit are here the values to measure, see actors/measuring/measure.py
            count = counted(facts["stop"] - facts["start"], "value")
            message = f"unit {facts['unit']}: {count} can't be measured: {facts['error']}"
        if message is not None:
            self._display.note(message)

    def show(self, totals: Totals) -> None:
        done, rows = totals.rows_done, totals.rows
        share, rate = ratio(done, rows), ratio(done - totals.rows_before, totals.wall_s)
        left = "-" if totals.eta_s is None else duration(totals.eta_s)
        figures = f"{rate:,.1f} samples/s  {counted(totals.committed.failed, 'error')}  ETA {left}"
        self._display.line(share, f"measured {done:,}/{rows:,} samples ({share:.0%})  {figures}")


def units_to_measure(store: Store, ready: CheckedMetrics) -> dict[int, UnitToMeasure]:
    """The units of all finished passes that lack some of the metrics, each with those that it lacks, by their numbers.

    The units of the first pass have their own numbers, those of later passes the following ones. Reads listings and the
    descriptions of sets, no unit. UserError if the run has a metric of the same column that was measured with other settings.
    """
    sets, measured = metric_sets(store), measured_units(store)
    _check_columns(ready, sets)
    identities = {name: {metric.identity for metric in metric_set.metrics} for name, metric_set in sets.items()}
    units: dict[int, UnitToMeasure] = {}
    first = 0
    for part in finished_passes(passes_of(store)):
        assert part.manifest is not None
        folder = "" if part.number == 1 else f"passes/{part.number:04d}/"
        for unit in part.manifest.units:
            there = set[str]().union(*(identities.get(name, ()) for name in measured.get((part.number, unit.unit), ())))
            lacking = tuple(n for n, metric in enumerate(ready.metrics) if metric.measured.identity not in there)
            if lacking:
                place = UnitToMeasure(part.number, unit.unit, f"{folder}{unit.object}", unit.rows, lacking)
                units[first + unit.unit] = place
        first += part.plan.units
    return units


def _check_columns(ready: CheckedMetrics, sets: Mapping[str, MetricSet]) -> None:
    there = {
        column: metric for metric_set in sets.values() for metric in metric_set.metrics for column in metric.columns
    }
    for metric in ready.metrics:
        now = metric.measured
        for column in now.columns:
            earlier = there.get(column, now)
            if earlier.identity != now.identity:
                keys = sorted(earlier.settings.keys() | now.settings.keys())
                changed = [key for key in keys if earlier.settings.get(key) != now.settings.get(key)]
                raise UserError(
                    f"the column {column!r} of this run was measured with other settings ({', '.join(changed) or 'columns'}); "
                    "results are never rewritten: give this metric another `name`",
                    field=metric.field,
                )


def measure_units(
    store: Store, ready: CheckedMetrics, *, backend: Backend, display: Display, stop: StopFlag, grace_s: float
) -> None:
    """Measure what is missing. The caller holds the run directory's lease.

    A metric has `workers.stall_s` for a row. A row on which a metric takes longer, or ends its process again and again, gets the
    reason as that metric's error. Raises Ended if it is interrupted, StoreError if the workers can't go on.
    """
    units = units_to_measure(store, ready)
    if not units:
        return
    for lacking in dict.fromkeys(unit.metrics for unit in units.values()):
        record_set(store, MetricSet(tuple(ready.metrics[index].measured for index in lacking)))
    limits, passes = limits_of(ready.spec), finished_passes(passes_of(store))
    job = MeasureJob(
        store=store.place.at(absolute(store.url)),
        fingerprint=passes[0].plan.fingerprint,
        code_version=__version__,
        metrics=ready.metrics,
        units=units,
        row_s=limits.lease_s,
        reference=ready.reference,
        joiner=ready.joiner,
    )
    rows, all_rows = sum(unit.rows for unit in units.values()), sum(part.plan.rows for part in passes)
    totals = Totals(units=len(units), rows=all_rows, rows_before=all_rows - rows)
    indices = sorted({index for unit in units.values() for index in unit.metrics})
    names = ", ".join(dict.fromkeys(ready.metrics[index].settings.shown for index in indices))
    display.note(f"measuring {names}: {counted(len(units), 'unit')}, {rows:,} samples")
    with backend.opened(display), stop.on_signals():
        allocation = _allocate_measurers(backend, ready, len(units))
        pool = backend.pool(job, allocation)
        limits = replace(limits, lease_s=limits.lease_s + MARGIN_S)
        values = ((number, unit.rows * len(unit.metrics)) for number, unit in units.items())
        sizes = (UnitSize(number, count, count) for number, count in values)
        scheduler = Scheduler(sizes, workers=allocation.count, limits=limits)
        is_done = False
        try:
            finish = Driver(scheduler, pool, MeasureDisplay(display), totals, stop, grace_s).run()
            is_done = finish.how == "done"
        finally:
            backend.end(pool, is_over=is_done)
    count = sum(part.plan.units for part in passes)
    raise_unfinished(
        finish, stop, lambda: f"{count - len(units_to_measure(store, ready)):,} of {counted(count, 'unit')} measured"
    )


def _allocate_measurers(backend: Backend, ready: CheckedMetrics, units: int) -> Allocation:
    """As many workers as the run's own `workers` allow, of one kind; they get GPUs only if there is a judge."""
    spec = ready.spec
    if not any(metric.place is not None for metric in ready.metrics):
        workers = spec.shapes[0].model_copy(update={"gpus": 0, "gpus_per_model": 1, "labels": {}})
        model = spec.model.model_copy(update={"device": "cpu"})
        spec = spec.model_copy(update={"workers": workers, "model": model})
    count, resources = backend.allocate(spec, units=units).largest
    return Allocation((replace(resources, threads=max(1, resources.threads), processes=1),), (count,))
