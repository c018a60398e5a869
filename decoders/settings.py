"""Settings of the decoders and of sampling: what a user may write under `decoder:` and `sampling:`.

Pure pydantic, without torch, so that a spec is checked in milliseconds. Every decoder family adds its settings here
and its algorithm in a file of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings model: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Settings):
    """How a token is drawn from the model's logits; the same warp is applied to target and draft."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    acceptance: Literal["coupled", "rejection"] = "coupled"


class AnySubset(Settings):
    """Sequential decoding of an any-subset model, one token per forward: the baseline."""

    kind: Literal["any_subset"]


class Parallel(Settings):
    """All holes at once in one forward, each independent of the others: fast and lossy."""

    kind: Literal["parallel"]


class Assd(Settings):
    """Any-subset speculative decoding (ASSD, Algorithms 1 and 2) and its one-pass variants."""

    kind: Literal["assd"]
    k: int = Field(default=5, ge=1, le=64)
    drafter: Literal["self", "ngram"] = "self"
    head: str = Field(default="auto", min_length=1, description="auto, none, or the folder of a draft head")
    fused: Literal["none", "rows", "chain"] = "none"
    rows: Literal["all", "ends"] = "all"

    @model_validator(mode="after")
    def _consistent(self) -> Assd:
        if self.drafter == "ngram" and self.fused != "none":
            raise ValueError(
                f"decoder.fused: {self.fused!r} drafts with the model itself; with drafter 'ngram' it must be 'none'"
            )
        if self.fused == "chain" and self.head == "none":
            raise ValueError(
                "decoder.head: fused 'chain' drafts with a draft head; head may be 'auto' or a folder, not 'none'"
            )
        return self


DecoderSettings = Annotated[AnySubset | Parallel | Assd, Field(discriminator="kind")]
DECODER_KINDS: dict[str, type[Settings]] = {"any_subset": AnySubset, "parallel": Parallel, "assd": Assd}
