"""Builds the meter of a metric that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from draftmill.actors.job import ModelPlace
from draftmill.actors.metrics.base import Meter
from draftmill.actors.metrics.settings import (
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
from draftmill.actors.sandbox.sandbox import Kind, Sandbox
from draftmill.storage.runs.metric_files import MeasuredMetric
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
    from draftmill.actors.metrics import overlaps, texts

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
            return overlaps.rouge(settings)
        case Bleu() as settings:
            return overlaps.bleu(settings)
        case Chrf() as settings:
            return overlaps.chrf(settings)
        case Judge() as settings:
            return _judge(metric, settings, threads, s3)
        case PassAtK() as settings:
            return _programs(metric, settings, threads)
        case OwnMetric() as settings:
            return _own(metric, settings)


def _judge(metric: ReadyMetric, settings: Judge, threads: int, s3: S3Options) -> Meter:
    from draftmill.actors.metrics.judge import load_judge

    assert metric.place is not None
    return load_judge(metric.place, prompt=settings.prompt, max_rows=settings.max_rows, threads=threads, s3=s3)


def _programs(metric: ReadyMetric, settings: PassAtK, threads: int) -> Meter:
    from draftmill.actors.metrics.programs import Programs
    from draftmill.actors.sandbox.self_test import find_sandbox

    assert metric.sandbox is not None
    find_sandbox(metric.sandbox, field=f"{metric.field}.sandbox")  # this machine may be another than the driver's
    return Programs(settings, Sandbox(metric.sandbox), threads, metric.samples)


def _own(metric: ReadyMetric, settings: OwnMetric) -> Meter:
    from draftmill.actors.metrics.own import load_function, own_metric

    assert metric.source is not None
    return own_metric(settings, load_function(metric.source, settings.path, field=metric.field))
