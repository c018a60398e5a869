"""The section `workers` of a spec: how many workers of which kind, their resources, and when one without progress is ended."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from draftmill.actors.task import as_tuple
from draftmill.decoders.common_settings import Settings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]

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
