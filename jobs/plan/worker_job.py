"""Builds the Job that workers receive from what will run and its plan."""

from __future__ import annotations

from dataclasses import replace

from draftmill.actors.job import Job
from draftmill.jobs.config.paths import absolute
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.resolve import Resolved
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.storage.inputs.rows import InputFiles
from draftmill.storage.runs.unit_table import parts_of


def make_job(resolved: Resolved, plan: Plan) -> Job:
    """The Job for the workers; local paths become absolute, since workers may have another working directory.

    The inputs are those that this session found, whose content is the plan's: their location and date may have changed.
    """
    spec, batching = resolved.spec, resolved.spec.batching
    here = {file.name: file for file in resolved.inputs}
    current = [here.get(file.name, file) for file in plan.files]
    return Job(
        store=plan.store.place.at(absolute(plan.store.url)),
        fingerprint=plan.fingerprint,
        code_version=plan.code_version,
        trace=spec.output.trace == "steps",
        model=spec.model_place(),
        recipe=resolved.recipe,
        max_rows=None if batching.max_rows == "auto" else batching.max_rows,
        max_tokens=None if batching.max_tokens == "auto" else batching.max_tokens,
        unit_rows=max((size.rows for size in plan.sizes()), default=1),
        files=InputFiles(
            (replace(a, uri=b.uri, mtime_s=b.mtime_s) for a, b in zip(plan.files, current, strict=True)),
            spec.s3.options(),
        ),
        parts=parts_of(plan.parts),
        earlier=resolved.earlier,
        keep=None if plan.keep is None else plan.keep.serialize().to_pybytes(),
    )


def limits_of(spec: JobSpec) -> Limits:
    """The scheduler's limits, with the spec's settings."""
    stall_s, start_s = (max(getattr(shape, key) for shape in spec.shapes) for key in ("stall_s", "start_s"))
    return Limits(attempts=spec.errors.attempts, lease_s=stall_s, start_s=start_s)
