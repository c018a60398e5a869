"""`draftmill measure`: measures metrics on the results of a finished run, and prints their means. Idempotent and resumable."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from draftmill.actors.metrics.settings import Metric, MetricBase, Metrics, as_mapping
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.finished.metric_ready import kept_in, ready_metrics
from draftmill.jobs.finished.passes import finished, passes_of
from draftmill.jobs.finished.summary import metric_lines
from draftmill.jobs.running.run import measure_run
from draftmill.jobs.running.session import RunOptions
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store


def measure(
    run_dir: str,
    words: Sequence[str],
    options: RunOptions,
    *,
    allow_code_execution: bool = False,
    reference: str | None = None,
    s3: S3Options | None = None,
) -> int:
    """Measure metrics, given as on the command line, on a finished run; returns the exit code."""
    store = open_store(run_dir, s3=s3)
    fields = [f"--metric {word}" for word in words]
    metrics = [parsed(word, allow_code_execution=allow_code_execution) for word in words]
    passes = passes_of(store, s3=s3)
    finished(passes)
    plan = passes[0].plan
    ready = ready_metrics(
        metrics, fields, plan.spec, kept_in(plan), reference=reference, s3=s3 or plan.spec.s3.options()
    )
    try:
        if not measure_run(store, plan.spec, ready, options, s3=s3):
            return INTERRUPTED
    except KeyboardInterrupt:  # a signal before or after the units are measured; while they are, it only sets a flag
        print("draftmill: interrupted; run it again to resume", file=sys.stderr)
        return INTERRUPTED
    print("\n".join([f"draftmill: metrics of {plan.spec.name}", *metric_lines(store, plan.rows)]))
    return OK


def parsed(word: str, *, allow_code_execution: bool) -> Metric:
    """A metric from the command line: a name, a Python file, or a mapping in YAML. UserError if it is none."""
    field = f"--metric {word}"
    value: Any = word
    if word.lstrip().startswith("{"):
        try:
            value = yaml.safe_load(word)
        except yaml.YAMLError as error:
            raise UserError(f"not a mapping in YAML: {' '.join(str(error).split())}", field=field) from None
    try:
        mapping = as_mapping(value, "metric")
    except ValueError as error:
        raise UserError(str(error).partition(": ")[2], field=field) from None
    if allow_code_execution and isinstance(mapping, dict) and mapping.get("kind") == "pass_at_k":
        mapping = {"allow_code_execution": True} | mapping
    try:
        [metric] = TypeAdapter(Metrics).validate_python([mapping], strict=True)
    except ValidationError as error:
        raise UserError(_first_problem(error), field=field) from None
    assert isinstance(metric, MetricBase)
    return metric


def _first_problem(error: ValidationError) -> str:
    """The first problem of a metric's settings, in words."""
    item = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in item["loc"][2:])
    if item["type"] == "extra_forbidden":
        return f"unknown setting {key!r}"
    if item["type"] == "missing":
        return f"{key}: missing; for example " + _EXAMPLES.get(str(item["loc"][1]), key)
    message = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    return f"{key}: {message}" if key else message


_EXAMPLES = {
    "judge": "'{kind: judge, model: builtin:ar-tiny}'",
    "file": "my_metric.py",
}
