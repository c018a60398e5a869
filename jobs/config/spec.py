"""The job spec: every key of a job's YAML file, checked before anything is loaded. Pure pydantic, no torch.

Specs are frozen, and unknown keys are errors at every level. docs/specs.md explains each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from draftmill.actors.job import ModelPlace, RowRecipe
from draftmill.actors.metrics.settings import Metrics
from draftmill.actors.task import NO_CHAT, NO_PROMPT, Chat, Prompt, Task
from draftmill.decoders.common_settings import Sampling, Settings
from draftmill.decoders.settings import DecoderSettings
from draftmill.jobs.config.dates import format_date, has_date, read_date, with_date
from draftmill.jobs.config.errors import spec_error
from draftmill.jobs.config.paths import FoundPlace, check_places, with_absolute, with_places
from draftmill.jobs.config.rules import kept_names, problems
from draftmill.jobs.config.sections import (
    BatchingSettings,
    ErrorSettings,
    InputSettings,
    ModelSettings,
    Name,
    OutputSettings,
    Receivers,
    S3Settings,
    Shapes,
    WorkerShape,
)
from draftmill.jobs.config.yaml_file import apply_changes, read_mapping, read_overrides
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import Place, S3Options

RESULT_SECTIONS = frozenset({"seed", "task", "decoder", "sampling", "prompt", "chat"})
RESULT_INPUT_KEYS = ("columns", "limit", "chunk_chars", "delimiter", "truncate", "keep", "dedupe", "where")
"""What of a spec changes results, beside some keys of `model`."""


class JobSpec(Settings):
    """A whole job."""

    name: Name = Field(default="job", description="in tables; else the file's name")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = Field(
        default=0, description="with a sample's id, decides all its randomness"
    )
    task: Annotated[Task, Field(discriminator="kind")]
    input: InputSettings
    model: ModelSettings
    decoder: Annotated[
        DecoderSettings, BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value)
    ]
    sampling: Sampling = Sampling(temperature=1.0, top_k=None, top_p=None)
    prompt: Prompt = NO_PROMPT
    chat: Chat = NO_CHAT
    batching: BatchingSettings = BatchingSettings()
    workers: Shapes = WorkerShape()
    errors: ErrorSettings = ErrorSettings()
    output: OutputSettings
    s3: S3Settings = S3Settings()
    metrics: Metrics = Field(default=(), description="what is measured after the last unit")
    notify: Receivers = Field(default=(), description="commands that get notices")

    @property
    def shapes(self) -> tuple[WorkerShape, ...]:
        """The kinds of workers that the job uses."""
        return self.workers if isinstance(self.workers, tuple) else (self.workers,)

    def recipe(self, ends: Sequence[int] = ()) -> RowRecipe:
        """What makes the canvases of the rows, with absolute local paths; `ends` are the end tokens of the model."""
        given = self.input
        return RowRecipe(
            task=self.task,
            columns=given.columns,
            decoder=with_absolute(self.decoder),
            sampling=self.sampling,
            ends=tuple(ends),
            truncate=given.truncate,
            chunk_chars=given.chunk_chars,
            seed=self.seed,
            prompt=self.prompt,
            chat=self.chat,
        )

    def model_place(self) -> ModelPlace:
        """The model section, with absolute local paths; `device: auto` of a job whose workers get no GPU is the CPU."""
        model = with_absolute(self.model)
        without_gpus = all(shape.gpus == 0 for shape in self.shapes)
        device = "cpu" if model.device == "auto" and without_gpus else model.device
        keys = model.model_dump(exclude={"path"}) | {"device": device}
        return ModelPlace(checkpoint=self.place(model.path), **keys)

    def place(self, url: str) -> Place:
        """A place that this job reads or writes."""
        return Place(url, self.s3.options())

    def with_drafting_runs(self, runs: tuple[str, ...]) -> JobSpec:
        """The job with other finished runs that draft; as it is if none do."""
        if runs == self.decoder.drafting_runs:
            return self
        return self.model_copy(update={"decoder": self.decoder.with_drafting_runs(runs)})

    @property
    def input_places(self) -> list[Place]:
        return [self.place(path) for path in self.input.paths]

    def with_s3(self, options: S3Options) -> JobSpec:
        """The same job with those S3 options that are not the defaults."""
        given = {key: value for key, value in asdict(options).items() if value not in {None, "auto"}}
        return self.model_copy(update={"s3": self.s3.model_copy(update=given)})

    @property
    def kept(self) -> tuple[str, ...]:
        """The columns of the inputs that travel into the results: `input.keep`, and references."""
        return kept_names(self.input.keep, self.input.columns, self.task, self.metrics, self.prompt)

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        self.check_together()
        return self

    def check_together(self) -> None:
        """Raise ValueError, with the key's path, if keys of several sections do not fit together."""
        for problem in problems(self):
            raise ValueError(problem)
        self.decoder.check_sampling(self.sampling)

    def results_key(self) -> dict[str, Any]:
        """The part of the spec that changes results, as JSON data; only this part enters the fingerprint.

        Most keys are there only with another value than their default, so that later keys leave fingerprints as they are. The
        planner adds hashes of the checkpoints, tokenizer and inputs, which are identified by content.
        """
        key = self.model_dump(mode="json", include=set(RESULT_SECTIONS), exclude_defaults=True)
        if isinstance(key["decoder"].get("drafter"), dict):
            for place in ("path", "revision"):
                key["decoder"]["drafter"].pop(place, None)
        if (
            self.task.kind == "infill" and self.decoder.baseline.runs_on != "causal"
        ):  # only causal models use these keys
            key["task"] = {name: value for name, value in key["task"].items() if name not in {"fim", "max_new_tokens"}}
        given = self.input.model_dump(mode="json", include=set(RESULT_INPUT_KEYS), exclude_defaults=True)
        model = self.model.model_dump(mode="json", include={"dtype", "exact", "weights"}, exclude_defaults=True)
        if self.shapes[0].gpus_per_model > 1:
            model["gpus_per_model"] = self.shapes[0].gpus_per_model
        return key | {"input": given, "model": model}


SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, from which an editor completes and explains keys.

    It knows each key by itself; rules that join several keys are `check_spec`'s alone.
    """
    return {"$schema": SCHEMA_URL, **JobSpec.model_json_schema()}


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a spec file, apply `a.b=VALUE` overrides (VALUE is YAML) and check it. The default name is the file's name.

    Raises UserError with the field's path, the value and the allowed values.
    """
    return check_spec({"name": Path(path).stem} | read_mapping(Path(path)), read_overrides(overrides))


def with_logical_date(spec: JobSpec, text: str) -> JobSpec:
    """The job for another logical date, as `--logical-date` gives it; UserError if it is none, or the output path has no date."""
    if not has_date(spec.output.path):
        raise UserError(
            f"{text!r}, but output.path has no date; write {{date:%Y-%m-%d}} in it, or leave the option out",
            field="--logical-date",
        )
    try:
        chosen = format_date(read_date(text))
    except ValueError as error:
        raise UserError(str(error), field="--logical-date") from None
    return spec.model_copy(update={"output": spec.output.model_copy(update={"logical_date": chosen})})


def at_date(spec: JobSpec, now: datetime) -> JobSpec:
    """The job with the date filled into its output path, `input.path`, `input.run` and the runs that draft: its logical date, or
    else `now`. UserError if one of them then is no place.

    Without a date in its output path, `spec` itself.
    """
    if not has_date(spec.output.path):
        return spec
    chosen = now if spec.output.logical_date is None else read_date(spec.output.logical_date)

    def filled(found: FoundPlace) -> str:
        return with_date(found.value, chosen) if found.keys[0] in {"input", "output", "decoder"} else found.value

    dated = with_places(spec, filled)
    output = dated.output.model_copy(update={"logical_date": format_date(chosen)})
    dated = dated.model_copy(update={"output": output})
    check_places(dated)
    return dated


def check_spec(data: dict[str, Any], changes: Iterable[tuple[str, Any]] = ()) -> JobSpec:
    """Return the spec for a mapping with other values for dotted keys; raises UserError as `load_spec` does."""
    data, changes = deepcopy((data, list(changes)))
    apply_changes(data, changes)
    try:
        return JobSpec.model_validate(data, strict=True)
    except ValidationError as error:
        raise spec_error(JobSpec, data, error, changes) from None
