"""From a spec and its plan to the Job that workers are given."""

from __future__ import annotations

from pathlib import Path

from actors.job import Job, ModelPlace
from decoders.settings import DecoderSettings
from jobs.plan import Plan
from jobs.spec import JobSpec


def make_job(spec: JobSpec, plan: Plan, *, conditional: bool) -> Job:
    """What the workers are told of a job; local paths are made absolute, since workers may stand elsewhere."""
    model = spec.model
    place = ModelPlace(
        path=absolute(model.path) if Path(model.path).exists() else model.path,
        revision=model.revision,
        family=model.family,
        mask_id=model.mask_id,
        tokenizer=model.tokenizer if model.tokenizer in {"auto", "none"} else absolute(model.tokenizer),
        dtype=model.dtype,
        device=model.device,
        trust_remote_code=model.trust_remote_code,
    )
    return Job(
        store_url=absolute(spec.output.path),
        s3=spec.s3.options(),
        fingerprint=plan.fingerprint,
        code_version=plan.code_version,
        conditional=conditional,
        trace=spec.output.trace == "steps",
        seed=spec.seed,
        model=place,
        decoder=decoder_of(spec),
        sampling=spec.sampling,
        max_rows=None if spec.batching.max_rows == "auto" else spec.batching.max_rows,
        max_tokens=None if spec.batching.max_tokens == "auto" else spec.batching.max_tokens,
        unit_rows=max((size.rows for size in plan.sizes()), default=1),
        task=spec.task,
        columns=spec.input.columns,
        chunk_chars=spec.input.chunk_chars,
        files=tuple(plan.files),
    )


def decoder_of(spec: JobSpec) -> DecoderSettings:
    """The decoder's settings with the folder of a draft head made absolute."""
    head = getattr(spec.decoder, "head", None)
    if head in {None, "auto", "none"}:
        return spec.decoder
    return spec.decoder.model_copy(update={"head": absolute(head)})


def absolute(path: str) -> str:
    """A local path as an absolute one; URLs stay as they are."""
    return path if "://" in path else str(Path(path).expanduser().absolute())
