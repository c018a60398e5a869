"""Settings of the decoders of any-subset models. Pure pydantic, without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from draftmill.decoders.base import ModelKind
from draftmill.decoders.common_settings import DecoderChoice, Head, RunDrafterSettings


class AnySubsetSettings(DecoderChoice):
    """Sequential decoding of an any-subset model, one token per forward: the baseline."""

    runs_on: ClassVar[ModelKind] = "any_subset"
    tasks: ClassVar = ("infill", "score")
    token_logprobs: ClassVar = True
    finds_lengths: ClassVar = True
    scorer: ClassVar = "draftmill.decoders.any_subset.sequential:scorer"
    scores_any: ClassVar = True
    runs: ClassVar = "draftmill.decoders.any_subset.sequential:any_subset_algorithm"
    kind: Literal["any_subset"]


class ParallelSettings(DecoderChoice):
    """All holes at once in one forward, each independent of the others: fast and lossy."""

    runs_on: ClassVar[ModelKind] = "any_subset"
    tasks: ClassVar = ("infill",)
    runs: ClassVar = "draftmill.decoders.any_subset.sequential:parallel_algorithm"
    kind: Literal["parallel"]


class AssdSettings(DecoderChoice):
    """Any-subset speculative decoding (ASSD, Algorithms 1 and 2) and its one-pass variants."""

    runs_on: ClassVar[ModelKind] = "any_subset"
    tasks: ClassVar = ("infill",)
    token_logprobs: ClassVar = True
    finds_lengths: ClassVar = True
    runs: ClassVar = "draftmill.decoders.any_subset.assd:algorithm"
    kind: Literal["assd"]
    k: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default=5, description="most tokens of a draft; auto: as many as pay (not under rejection)"
    )
    drafter: Literal["self", "ngram"] | RunDrafterSettings = Field(
        default="self", description="the model itself, n-grams of the canvas, or finished runs"
    )
    head: Head = Field(default="auto", description="auto: the model's own; none; or a draft head's folder")
    fused: Literal["none", "rows"] = Field(default="none", description="rows: one forward verifies and drafts anew")
    rows: Literal["all", "ends"] = Field(default="all", description="fused: prepare for all outcomes or for two")

    @model_validator(mode="after")
    def _consistent(self) -> AssdSettings:
        by_run = isinstance(self.drafter, RunDrafterSettings)
        if self.drafter != "self" and self.fused != "none":
            shown = "run" if by_run else self.drafter
            raise ValueError(
                f"decoder.fused: {self.fused!r} drafts with the model itself; with drafter {shown!r} it must be 'none'"
            )
        if by_run and self.k != type(self).model_fields["k"].default:
            raise ValueError(f"decoder.k: {self.k!r}, but the drafts of a run are as long as decoder.drafter.k allows")
        return self

    @property
    def draft_head(self) -> str:
        return self.head
