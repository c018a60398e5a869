"""Measures the metrics that a finished run lacks, under the run's lease: `draftmill measure`, and the end of a run with metrics.

Idempotent and resumable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import yaml
from pydantic import TypeAdapter, ValidationError

from draftmill.actors.metrics.settings import Metric, MetricBase, Metrics, as_mapping
from draftmill.jobs.driving.backend import backend_of
from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.lease_keeper import kept_lease
from draftmill.jobs.driving.progress import make_display
from draftmill.jobs.driving.session import RayDidNotStart
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.finished.measure import measure_units, units_to_measure
from draftmill.jobs.finished.metric_figures import metric_lines
from draftmill.jobs.finished.metric_ready import Ready, kept_in, ready_metrics
from draftmill.jobs.finished.passes import finished, passes_of
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import open_store, sweep


class Options(Protocol):
    """How to run (draftmill.jobs.running.session.RunOptions)."""

    @property
    def ray_address(self) -> str | None: ...

    @property
    def local(self) -> bool: ...

    @property
    def quiet(self) -> bool: ...

    @property
    def grace_s(self) -> float: ...


def measure_run(
    store: Store,
    spec: JobSpec,
    ready: Ready,
    options: Options,
    *,
    s3: S3Options | None,
    lease: Callable[[Store, Callable[[str], None]], AbstractContextManager[Lease]] = kept_lease,
) -> bool:
    """Measure what a finished run lacks; returns whether all is measured. If not, the user has been told why.

    `lease` holds the run's lease; of its errors only LeaseHeld is told here.
    """
    if not units_to_measure(store, passes_of(store, s3=s3), ready):
        return True
    backend = backend_of(address=options.ray_address, local=options.local)
    stop = StopFlag()
    try:
        with lease(store, stop.set), make_display(quiet=options.quiet) as display:
            sweep(store)
            is_done = measure_units(
                store,
                spec,
                passes_of(store, s3=s3),  # read again: under the lease, no other driver adds a pass
                ready,
                backend=backend,
                local=options.local,
                display=display,
                stop=stop,
                grace_s=options.grace_s,
                s3=s3 or S3Options(),
            )
    except (LeaseHeld, LeaseLost) as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return False
    except RayDidNotStart as error:
        raise StoreError(f"{error}; run it again to resume") from error
    if not is_done:
        say_interrupted(store, ready, s3=s3)
    return is_done


def say_interrupted(store: Store, ready: Ready, *, s3: S3Options | None) -> None:
    """Say how far an interrupted measurement came."""
    passes = finished(passes_of(store, s3=s3))
    units, left = sum(one.plan.units for one in passes), len(units_to_measure(store, passes, ready))
    print(
        f"draftmill: interrupted with {units - left:,} of {units:,} units measured; run it again to resume",
        file=sys.stderr,
    )


def measure(
    run_dir: str,
    words: Sequence[str],
    options: Options,
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
