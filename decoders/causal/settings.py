"""Settings of the causal decoders and their drafters. Pydantic only, no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.common_settings import (
    MODEL,
    DecoderChoice,
    DrafterPlace,
    Head,
    RunDrafterSettings,
    Settings,
    Tasks,
)


class CausalSettings(DecoderChoice):
    """What the decoders of causal models share."""

    runs_on: ClassVar[ModelKind] = "causal"
    tasks: ClassVar[Tasks] = ("infill", "complete")
    token_logprobs: ClassVar = True


class AutoregressiveSettings(CausalSettings):
    """Sequential decoding of a causal model, one token per forward: the baseline."""

    tasks: ClassVar = ("infill", "complete", "score")
    scorer: ClassVar = "draftmill.decoders.causal.autoregressive:scorer"
    runs: ClassVar = "draftmill.decoders.causal.autoregressive:algorithm"
    kind: Literal["autoregressive"]


class ModelDrafterSettings(DrafterPlace):
    """A smaller causal model with the same vocabulary drafts."""

    kind: Literal["model"]


class HeadDrafterSettings(DrafterPlace):
    """A published head trained for this model drafts (EAGLE-3, DFlash, DSpark; a folder in the format of `speculators`)."""

    kind: Literal["head"]


class NgramDrafterSettings(Settings):
    """Prompt look-up: drafts the tokens after the last occurrence of the last `max_n` (down to `min_n`) tokens."""

    kind: Literal["ngram"]
    max_n: int = Field(default=3, ge=1, le=16, description="most tokens that must match")
    min_n: int = Field(default=1, ge=1, le=16, description="fewest tokens that must match")

    @model_validator(mode="after")
    def _check_order(self) -> NgramDrafterSettings:
        if self.min_n > self.max_n:
            raise ValueError(f"decoder.drafter.min_n: {self.min_n} is above max_n = {self.max_n}; allowed: 1 .. max_n")
        return self


class SuffixDrafterSettings(Settings):
    """Drafts what followed the longest end of a sample's text elsewhere in the last `max_tokens` tokens of its worker
    (SuffixDecoding), while all drafts hold with `min_token_prob`.

    The index holds at least half of these tokens. Up to `max_spec_factor` times as many tokens are drafted as match; how often
    a token followed gives its probability.
    """

    kind: Literal["suffix"]
    max_tokens: int = Field(
        default=1 << 20, ge=1 << 10, le=1 << 28, description="the index holds the last N tokens, at least half of them"
    )
    max_spec_factor: float = Field(
        default=1.0, gt=0.0, le=64.0, description="drafts at most N times the tokens that match"
    )
    min_token_prob: float = Field(
        default=0.1, ge=0.0, le=1.0, description="drafts while all hold with this probability"
    )


class MasksDrafterSettings(Settings):
    """The model's own masks draft, `k` in each forward that verifies (I-DLM); only masks run through an adapter."""

    kind: Literal["masks"]
    path: Annotated[str, MODEL] | None = Field(
        default=None, min_length=1, description="null: none; a PEFT LoRA adapter of masks, as in model.adapter"
    )
    revision: str | None = Field(default=None, description="of a hub adapter")

    @model_validator(mode="after")
    def _revision_of_a_path(self) -> MasksDrafterSettings:
        if self.revision is not None and self.path is None:
            reason = (
                f"{self.revision!r} is not allowed without decoder.drafter.path; allowed: null, or a hub id as path"
            )
            raise ValueError(f"decoder.drafter.revision: {reason}")
        return self


class SpeculativeSettings(CausalSettings):
    """Speculative decoding of a causal model (Leviathan et al., 2023; Chen et al., 2023)."""

    runs: ClassVar = "draftmill.decoders.causal.speculative:algorithm"
    kind: Literal["speculative"]
    k: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default=5, description="most tokens of a draft; auto: as many as pay (not under rejection)"
    )
    drafter: (
        ModelDrafterSettings
        | HeadDrafterSettings
        | MasksDrafterSettings
        | NgramDrafterSettings
        | SuffixDrafterSettings
        | RunDrafterSettings
    ) = Field(default=NgramDrafterSettings(kind="ngram"), discriminator="kind", description="what drafts")

    @model_validator(mode="after")
    def _one_k(self) -> SpeculativeSettings:
        if isinstance(self.drafter, RunDrafterSettings) and self.k != type(self).model_fields["k"].default:
            raise ValueError(f"decoder.k: {self.k!r}, but the drafts of a run are as long as decoder.drafter.k allows")
        return self

    @property
    def drafts_of_neighbours(self) -> bool:
        return isinstance(self.drafter, SuffixDrafterSettings)

    def check_model(self, info: ModelInfo) -> None:
        if isinstance(self.drafter, MasksDrafterSettings) and info.mask_id is None:
            raise ValueError(
                f"decoder.drafter.kind: 'masks', but models of family {info.family!r} have no mask token; allowed: models with "
                "model.family: idlm, or a model.mask_id that the model was trained with; or another drafter"
            )


class SpecDiffSettings(CausalSettings):
    """Speculative decoding of a causal model whose drafts a masked-diffusion model fills in (SpecDiff).

    Up to `gamma` masks after the text are revealed in at most `steps` forwards: from left to right, or in the random order of
    diffusion (`native`), which under sampling.acceptance 'rejection' is lossy. The drafter's window is the text and the masks
    (`short`), or has the length it was trained on, with masks at the end (`full`). A draft head corrects each draft for those
    that were revealed before it in the same forward; there is none for the native order.
    """

    runs: ClassVar = "draftmill.decoders.causal.specdiff:algorithm"
    kind: Literal["specdiff"]
    gamma: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        default=8, description="most tokens of a draft; auto: as many as pay (not under rejection)"
    )
    steps: int = Field(default=2, ge=1, le=256, description="forwards of the drafter for one draft, at most")
    order: Literal["left_to_right", "native"] = Field(
        default="left_to_right", description="order of the drafts; native (random) is lossy under rejection"
    )
    window: Literal["short", "full"] = Field(default="short", description="masks of the draft or of the trained length")
    drafter: DrafterPlace = Field(description="a masked-diffusion model with the same vocabulary")
    head: Head = Field(default="auto", description="auto: the drafter's own; none; or a head's folder")

    @model_validator(mode="after")
    def _head_needs_order(self) -> SpecDiffSettings:
        if self.order == "native" and self.head not in {"auto", "none"}:
            raise ValueError(
                f"decoder.head: {self.head!r} corrects a draft for those before it, which in the order 'native' may come "
                "later; allowed with it: auto, none"
            )
        return self

    @property
    def draft_head(self) -> str:
        """See DecoderChoice; in the native order none can serve."""
        return "none" if self.order == "native" else self.head

    def check_drafter(self, drafter: ModelInfo) -> None:
        """Raise ValueError if a full window is requested and its length is unknown."""
        if self.window == "full" and drafter.max_length is None:
            raise ValueError(
                "decoder.window: 'full' is the length that the drafter was trained on, which its config.json doesn't say; "
                "allowed: short"
            )


class JacobiSettings(CausalSettings):
    """Jacobi decoding of a causal model: a block of drafts, refined by every forward until it is the model's own text."""

    draft_law: ClassVar = False
    runs: ClassVar = "draftmill.decoders.causal.jacobi:jacobi_algorithm"
    kind: Literal["jacobi"]
    block_size: int = Field(default=16, ge=1, le=256, description="tokens of a block")
    window: Literal["fixed", "running"] = Field(default="fixed", description="a block at a time, or always N drafts")


class MultiblockJacobiSettings(CausalSettings):
    """Jacobi decoding with several blocks at once and rejection recycling (pcLLM, Algorithm 1)."""

    draft_law: ClassVar = False
    runs: ClassVar = "draftmill.decoders.causal.jacobi:multiblock_algorithm"
    kind: Literal["multiblock_jacobi"]
    block_size: int = Field(default=16, ge=1, le=256, description="tokens of a block")
    blocks: int = Field(default=2, ge=1, le=8, description="blocks at once")
    spawn_ratio: float = Field(default=0.85, gt=0.0, le=1.0, description="accepted share when the next block starts")
    verify_size: int = Field(default=4, ge=1, le=16, description="the draft and its candidates")
    pool_size: int = Field(default=4, ge=0, le=256, description="rejected runs of tokens kept as candidates")

    @property
    def keeps_bits(self) -> bool:
        return False
