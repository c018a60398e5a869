"""The sections of a spec, each with its keys; those of tasks, decoders and metrics are beside the code that uses them."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from draftmill.actors.task import INPUTS, Columns, Side, as_tuple, one_or_more
from draftmill.decoders.common_settings import FOLDER, MODEL, Dtype, PathMark, Settings
from draftmill.jobs.config.dates import format_date, read_date
from draftmill.storage.inputs.where import parse_where
from draftmill.storage.secrets import has_authorization, redacted
from draftmill.storage.stores.store import S3Options

Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
Event = Literal["finish", "failure", "stall", "interrupt"]
Text = Annotated[str, Field(min_length=1)]


def _delimiter(character: str) -> str:
    character = {"\\t": "\t", "tab": "\t"}.get(character, character)
    if len(character) != 1 or character in '"\r\n\0' or not (character.isprintable() or character == "\t"):
        raise ValueError(f"{character!r} is not allowed; allowed: one character, for example ; or | or tab")
    return character


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("a column is named twice")
    return names


def _where(text: str) -> str:
    parse_where(text)
    return text


class InputSettings(Settings):
    """Where the rows are: one path or several, each of which must exist, or a finished run."""

    path: Annotated[
        Text | Annotated[tuple[Text, ...], BeforeValidator(as_tuple), Field(min_length=1)] | None,
        INPUTS,
    ] = Field(default=None, description="file, glob, folder, s3://, gs://, az://, hf:// or builtin:python-stdlib")
    run: Annotated[Text | None, PathMark(("s3",))] = Field(default=None, description="a finished run, in place of path")
    where: Annotated[Text, AfterValidator(_where)] | None = Field(
        default=None, description="rows of the run, such as `exact_match >= 1`; null: all that are ok"
    )
    columns: Columns = Field(default=Columns(), description="which column holds what")
    limit: Positive | None = Field(default=None, description="the first N rows over all files")
    chunk_chars: Positive | None = Field(default=None, description="cut text files into rows of N characters")
    delimiter: Annotated[str, AfterValidator(_delimiter)] | None = Field(
        default=None, description="of csv: a character, or tab; null: a comma, in .tsv a tab"
    )
    truncate: Side | None = Field(default=None, description="side of a long prompt that is cut; null: its row fails")
    keep: Annotated[tuple[Text, ...], BeforeValidator(as_tuple), AfterValidator(_once)] = Field(
        default=(), description="columns that are copied into the results"
    )
    since: Literal["last_success"] | None = Field(default=None, description="skip files that a finished run has read")
    dedupe: Literal["ids"] | None = Field(default=None, description="skip rows that a finished run already has as ok")

    @model_validator(mode="after")
    def _one_source(self) -> InputSettings:
        if self.path is None and self.run is None:
            raise ValueError("input.path: missing; or name a finished run in input.run")
        if self.run is None and self.where is not None:
            raise ValueError("input.where: filters the rows of a run; name it in input.run")
        if self.run is not None and self.since is not None:
            raise ValueError(
                "input.since: compares files of input.path, and here the rows are those of a run; allowed: null"
            )
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files; none if the input is a run."""
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @property
    def shown(self) -> str:
        """The path or paths, or the run, as a message shows them."""
        return ", ".join(self.paths) or f"run {self.run}"


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"{name!r} is not allowed; allowed: auto, cpu, cuda, cuda:N")
    return name


class ModelSettings(Settings):
    """Which checkpoint, and how it is loaded."""

    path: Annotated[Text, MODEL] = Field(
        description="builtin:NAME, a folder, s3://bucket/prefix, a hub id, or a .gguf file there"
    )
    adapter: Annotated[Text | None, MODEL] = Field(
        default=None, description="a PEFT LoRA adapter: a folder, s3://..., or a hub id"
    )
    family: Text = Field(default="auto", description="`draftmill models` lists all")
    revision: str | None = Field(default=None, description="of a hub model")
    mask_id: Annotated[int, Field(ge=0)] | None = Field(default=None, description="null: the family's own, if any")
    tokenizer: Annotated[Text, FOLDER] = Field(
        default="auto", description="auto (the model's), a folder, or none (rows give tokens)"
    )
    dtype: Dtype = Field(default="auto", description="auto: float32, which is exact, on CPU; bfloat16 on GPU")
    weights: Literal["auto", "int8", "w8a8", "int4", "fp8"] = Field(
        default="auto", description="the layers' matrices; auto: in dtype"
    )
    device: Annotated[str, AfterValidator(_device)] = Field(default="auto", description="auto prefers GPU; cpu; cuda:N")
    trust_remote_code: bool = Field(default=False, description="for tokenizers' loaders, never for models")
    exact: bool = Field(default=False, description="refuse the job unless texts have the same bits in any batch")


class BatchingSettings(Settings):
    """How much a worker decodes at once, and how many rows are sorted together."""

    max_tokens: Auto | Positive = Field(default="auto", description="most cache columns of all slots")
    max_rows: Auto | Positive = Field(default="auto", description="most slots of a worker")
    window: Positive = Field(default=65536, description="rows that are sorted together")

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """A worker's max_rows and max_tokens; None if it chooses."""
        rows, tokens = self.max_rows, self.max_tokens
        return None if rows == "auto" else rows, None if tokens == "auto" else tokens


class ErrorSettings(Settings):
    """How many samples may fail, and how often a unit is tried."""

    max_rate: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        default=None, description="largest share of failed rows, of few rows 5 %; null: 0.01, with max_count 1"
    )
    max_count: Annotated[int, Field(ge=0)] | None = Field(default=None, description="most failed samples")
    attempts: Positive = Field(default=3, description="failures of a unit before its rows are examined")

    @property
    def rate(self) -> float:
        """The largest share, `max_rate` or its default."""
        return self.max_rate if self.max_rate is not None else 0.01 if self.max_count is None else 1.0


def _date(value: Any) -> Any:
    if isinstance(value, date):  # YAML has dates of its own
        value = value.isoformat()
    return format_date(read_date(value)) if isinstance(value, str) else value


class OutputSettings(Settings):
    """Where the results go. A path with a date, as in `base/{date:%Y-%m-%d}`, is that of a recurring job."""

    path: Annotated[Text, PathMark(("s3", "memory"))] = Field(description="a folder or s3://bucket/prefix")
    logical_date: Annotated[str, BeforeValidator(_date)] | None = Field(
        default=None, description="date for {date:...}; null: the start's"
    )
    trace: Literal["none", "steps"] = Field(default="none", description="steps: one row per decoder iteration")
    unit_rows: Auto | Positive = Field(default="auto", description="rows of a unit, at most 2^19 tokens")


def _endpoint(url: str) -> str:
    # The spec is copied into the run directory.
    if "@" in url or "?" in url:
        raise ValueError("no credentials in the spec; they come from the environment, as boto3 finds them")
    return url


class S3Settings(Settings):
    """How to reach S3, for inputs, models and results alike. Credentials come from the environment."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(default=None, description="URL, no credentials")
    region: str | None = Field(default=None, description="as for boto3")
    addressing: Literal["auto", "path", "virtual"] = Field(default="auto", description="auto: path with an endpoint")
    checksums: Literal["auto", "when_required", "when_supported"] = Field(
        default="auto", description="auto: SHA-256; when_required: none; when_supported: boto3's"
    )

    def options(self) -> S3Options:
        """The same settings as storage's S3Options."""
        return S3Options(self.endpoint, self.region, self.addressing, self.checksums)


def _printable(name: str) -> str:
    # The name is the heading of tables on a terminal.
    if not name.isprintable():
        raise ValueError("has control characters")
    return name


Name = Annotated[Text, AfterValidator(_printable)]


_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:{_NAME}(?:\.{_NAME})*/)?{_NAME}")
_VALUE = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")
"""Ray's label selectors."""


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a label of a node; allowed: letters, digits, - _ . and one prefix with /")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{key}: {value!r} is not allowed; allowed: VALUE, !VALUE, in(A, B), !in(A, B)")
    return labels


class WorkerShape(Settings):
    """Workers of one kind: how many, and the resources of each."""

    count: Literal["auto"] | Positive = Field(default="auto", description="auto: as many as GPUs, else CPUs, allow")
    gpus: Literal["auto"] | Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        default="auto", description="per worker; auto: one if a selected node has any"
    )
    cpus: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = Field(default=1, description="per worker (Ray's CPUs)")
    gpus_per_model: Positive = Field(default=1, description="processes over which one model is split")
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = Field(
        default_factory=dict, description="nodes' labels: VALUE, !VALUE, in(A, B), !in(A, B)"
    )
    stall_s: Seconds = Field(default=600.0, description="a worker without progress for N seconds is killed")
    start_s: Seconds = Field(default=1800.0, description="a worker not up after N seconds is requested again")

    @field_validator("gpus")
    @classmethod
    def _whole_or_a_fraction(cls, gpus: float | str) -> float | str:
        if isinstance(gpus, float) and gpus > 1 and gpus != int(gpus):
            raise ValueError(f"{gpus:g} is not allowed; allowed: auto, 0, a fraction below 1, or a whole number")
        return gpus

    @model_validator(mode="after")
    def _one_gpu_for_each_part(self) -> WorkerShape:
        if self.gpus_per_model > 1 and self.gpus not in {"auto", 0, self.gpus_per_model}:
            raise ValueError(
                f"gpus: {self.gpus:g}, but gpus_per_model is {self.gpus_per_model}; allowed: auto, 0, {self.gpus_per_model}"
            )
        return self

    def gpus_if(self, has_gpus: bool) -> float:
        """GPUs of each worker, where `has_gpus` says what `auto` finds."""
        return float(has_gpus * self.gpus_per_model) if self.gpus == "auto" else self.gpus

    @property
    def resources(self) -> tuple[Any, ...]:
        """What Ray is asked for: a worker of one kind can take over another one's place if this is the same."""
        return self.cpus, self.gpus, self.gpus_per_model, tuple(sorted(self.labels.items()))


def _form(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "one"


_Several = Annotated[tuple[WorkerShape, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=64)]

Shapes = Annotated[Annotated[WorkerShape, Tag("one")] | Annotated[_Several, Tag("list")], Discriminator(_form)]
"""`workers` is one mapping, or a list of such mappings for several kinds of workers."""


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if redacted(word) != word or has_authorization(word):
            raise ValueError(
                "no credentials in the spec, which is copied into the run directory; the command has the driver's environment"
            )
    return words


class NotifySettings(Settings):
    """One receiver of notices."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(one_or_more, json_schema_input_type=str | tuple[str, ...]),
        Field(min_length=1),
        AfterValidator(_command),
    ] = Field(description="a command and its arguments; it reads the notice from standard input")
    on: Annotated[
        tuple[Event, ...],
        BeforeValidator(one_or_more, json_schema_input_type=Event | tuple[Event, ...]),
        Field(min_length=1),
    ] = Field(default=("finish", "failure", "stall"), description="the events of which it is notified")


def as_receivers(value: Any) -> Any:
    """One receiver, or a list of them, as a tuple."""
    return (value,) if isinstance(value, dict) else as_tuple(value)


Receivers = Annotated[
    tuple[NotifySettings, ...],
    BeforeValidator(as_receivers, json_schema_input_type=NotifySettings | tuple[NotifySettings, ...]),
]
