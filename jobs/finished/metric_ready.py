"""Checks metrics before any unit is measured: packages, files, judges, the sandbox, and what the run's results hold."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.actors.checkpoints.models import fetch_model, model_hash, tokenizer_hash, user_error
from draftmill.actors.job import ModelPlace
from draftmill.actors.metrics.registry import ReadyMetric, load_function
from draftmill.actors.metrics.settings import Judge, Metric, OwnMetric, PassAtK, expand_metrics, needs_reference
from draftmill.actors.metrics.texts import PACKAGES
from draftmill.actors.rows.text import has_tokenizer
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.worker_job import where
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.jobs.spec.rules import metric_problem, reference_of
from draftmill.storage.errors import UserError
from draftmill.storage.runs.metric_files import MeasuredMetric, MetricSet
from draftmill.storage.stores.interface import S3Options


@dataclass(frozen=True, slots=True)
class Ready:
    """Metrics that can be measured; `reference` and `joiner` as in draftmill.actors.measuring.measure.MeasureJob."""

    metrics: tuple[ReadyMetric, ...]
    reference: str | None
    joiner: str | None


def ready_metrics(
    metrics: Sequence[Metric],
    fields: Sequence[str],
    spec: JobSpec,
    kept: Sequence[str],
    *,
    reference: str | None = None,
    s3: S3Options,
) -> Ready:
    """Check metrics against a job whose results keep the columns `kept`; UserError, with the path, if one can't be measured.

    `fields` are the metrics' paths in the spec or their words on the command line; `reference` names another kept column.
    """
    columns, task = spec.input.columns, spec.task
    if reference is not None and reference not in kept:
        there = ", ".join(kept) or "none"
        raise UserError(
            f"the results keep no column {reference!r}; columns in the results: {there}", field="--reference"
        )
    found, joiner = reference_of(columns, task, kept, reference)
    problem = metric_problem(
        metrics,
        fields,
        kept=kept,
        has_reference=found is not None,
        has_tokenizer=spec.model.tokenizer != "none",
        samples=spec.sampling.n,
    )
    if problem is not None:
        raise UserError(problem[1], field=problem[0])
    checked = {index: _checked(metric, fields[index], spec, s3) for index, metric in enumerate(metrics)}
    ready = []
    for index, part in expand_metrics(metrics):
        extra, more = checked[index]
        settings = part.model_dump(mode="json", exclude=set(part.changes_nothing)) | extra
        if needs_reference(part):
            settings["reference"] = [found, joiner]
        measured = MeasuredMetric(settings, part.columns(), part.estimates())
        ready.append(ReadyMetric(part, measured, fields[index], **more))
    return Ready(tuple(ready), found, joiner)


def kept_in(plan: Plan) -> tuple[str, ...]:
    """The columns of the inputs that the run's results hold."""
    return () if plan.keep is None else tuple(plan.keep.names)


def check_columns(ready: Ready, sets: Mapping[str, MetricSet]) -> None:
    """Raise UserError if the run has a metric of the same column that was measured with other settings."""
    there = {column: metric for found in sets.values() for metric in found.metrics for column in metric.columns}
    for metric in ready.metrics:
        for column in metric.measured.columns:
            earlier = there.get(column)
            if earlier is not None and earlier.identity != metric.measured.identity:
                now = metric.measured
                changed = sorted(
                    key
                    for key in {*earlier.settings, *now.settings}
                    if earlier.settings.get(key) != now.settings.get(key)
                )
                raise UserError(
                    f"the column {column!r} of this run was measured with other settings ({', '.join(changed) or 'columns'}); "
                    "results are never rewritten: give this metric another `name`",
                    field=metric.field,
                )


def _checked(metric: Metric, field: str, spec: JobSpec, s3: S3Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """What else decides the metric's values (hashes), and the fields of its ReadyMetric; UserError if it can't be measured."""
    package = PACKAGES.get(metric.kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(f"{metric.kind} needs {package}: pip install 'draftmill[metrics]'", field=field)
    match metric:
        case OwnMetric():
            return _own(metric, field)
        case Judge():
            return _judge(metric, field, s3)
        case PassAtK():
            return _programs(metric, field, spec)
    return {}, {}


def _own(metric: OwnMetric, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        source = Path(metric.path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{metric.path} can't be read: {error}", field=field) from None
    load_function(source, metric.path, field=field)
    return {"sha256": hashlib.sha256(source.encode()).hexdigest()}, {"source": source}


def _judge(metric: Judge, field: str, s3: S3Options) -> tuple[dict[str, Any], dict[str, Any]]:
    from draftmill.decoders.backbones.checkpoint import inspect_model

    place = f"{field}.model"
    folder = fetch_model(metric.model, metric.revision, s3=s3, field=place)
    try:
        info = inspect_model(folder)
    except ValueError as error:
        found = user_error(error, place)
        raise UserError(found.message, field=place) from None
    if info.kind != "causal":
        raise UserError(f"{metric.model} is of family {info.family!r}; allowed: causal models", field=place)
    if not has_tokenizer(folder):
        raise UserError(f"{metric.model} has no tokenizer, which texts need", field=place)
    model = ModelPlace(
        where(metric.model), metric.revision, "auto", None, "auto", metric.dtype, metric.device, trust_remote_code=False
    )
    hashes = {"model_sha256": model_hash(folder), "tokenizer_sha256": tokenizer_hash(folder)}
    return hashes, {"place": model}


def _programs(metric: PassAtK, field: str, spec: JobSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    from draftmill.actors.sandbox.sandbox import find_sandbox

    found = find_sandbox(metric.sandbox, field=f"{field}.sandbox")
    return {}, {"sandbox": found.kind, "samples": spec.sampling.n}
