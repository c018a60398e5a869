"""Builds the Job that workers receive from a spec and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftmill.actors.job import Job, ModelPlace
from draftmill.jobs.config.paths import absolute, with_absolute
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.storage.inputs.rows import InputFile, InputFiles
from draftmill.storage.runs.unit_table import parts_of


def make_job(spec: JobSpec, plan: Plan, *, inputs: Sequence[InputFile] = ()) -> Job:
    """The Job for the workers; local paths become absolute, since workers may have another working directory.

    `inputs` are the inputs as this session found them, whose content is the plan's: their location and date may have changed.
    """
    ends = plan.results["task"].get("ends", ())
    here = {file.name: file for file in inputs}
    current = [here.get(file.name, file) for file in plan.files]
    return Job(
        store=spec.place(absolute(spec.output.path)),
        fingerprint=plan.fingerprint,
        code_version=plan.code_version,
        trace=spec.output.trace == "steps",
        model=place_of(spec),
        # The plan has the date and the rows of the examples.
        recipe=replace(
            spec.recipe(ends), task=plan.spec.task, prompt=plan.spec.prompt, decoder=with_absolute(spec.decoder)
        ),
        max_rows=None if spec.batching.max_rows == "auto" else spec.batching.max_rows,
        max_tokens=None if spec.batching.max_tokens == "auto" else spec.batching.max_tokens,
        unit_rows=max((size.rows for size in plan.sizes()), default=1),
        files=InputFiles(
            (replace(a, uri=b.uri, mtime_s=b.mtime_s) for a, b in zip(plan.files, current, strict=True)),
            spec.s3.options(),
        ),
        parts=parts_of(plan.parts),
        keep=None if plan.keep is None else plan.keep.serialize().to_pybytes(),
    )


def place_of(spec: JobSpec) -> ModelPlace:
    """The model section, with absolute local paths; `device: auto` of a job whose workers get no GPU is the CPU."""
    model = with_absolute(spec.model)
    without_gpus = all(shape.gpus == 0 for shape in spec.shapes)
    return ModelPlace(
        checkpoint=spec.place(model.path),
        revision=model.revision,
        family=model.family,
        mask_id=model.mask_id,
        tokenizer=model.tokenizer,
        dtype=model.dtype,
        device="cpu" if model.device == "auto" and without_gpus else model.device,
        trust_remote_code=model.trust_remote_code,
        adapter=model.adapter,
        exact=model.exact,
        weights=model.weights,
    )


def limits_of(spec: JobSpec) -> Limits:
    """The scheduler's limits, with the spec's settings."""
    stall_s, start_s = (max(getattr(shape, key) for shape in spec.shapes) for key in ("stall_s", "start_s"))
    return Limits(attempts=spec.errors.attempts, lease_s=stall_s, start_s=start_s)
