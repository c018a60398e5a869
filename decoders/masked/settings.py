"""Settings of the decoders of masked-diffusion models. Pure pydantic, without torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.common_settings import DecoderChoice, RunDrafterSettings, Tasks

_Count = Annotated[int, Field(ge=1, le=2**20)]
_PREDICTORS: Final = {"mdlm": ("ddpm",), "sedd": ("analytic", "euler")}


class MaskedSettings(DecoderChoice):
    """Settings shared by the decoders of masked-diffusion models.

    Blocks begin at the first hole. With a `cache`, positions outside of a forward's window are read as they were when it was
    built. `dual_relaxed` is for `ssd` only: its drafts continue where the cache would be rebuilt, which is lossy. With `draws:
    kept` a position keeps its random numbers until it is revealed, which is another distribution where the order depends on the
    tokens drawn (`top1` above temperature 0), and the same elsewhere. With a `guidance_scale` w tokens are drawn from the logits
    u + (w + 1) (c - u), of the canvas c and of u, the canvas without what was given.
    """

    runs_on: ClassVar[ModelKind] = "masked"
    tasks: ClassVar[Tasks] = ("infill", "complete")
    finds_lengths: ClassVar[bool] = True
    block_length: _Count | None = Field(default=32, description="positions of a block; null: the canvas is one block")
    confidence: Literal["top1", "margin", "entropy", "random"] = Field(
        default="top1", description="which position comes next"
    )
    cache: Literal["none", "prefix", "dual_strict", "dual_relaxed"] = Field(
        default="none", description="what a forward reads instead of computing it"
    )
    refresh: _Count | None = Field(default=None, description="refresh the cache after N tokens; null: once a block")
    draws: Literal["fresh", "kept"] = Field(default="fresh", description="draw masks anew each step, or keep noise")
    guidance_scale: float = Field(
        default=0.0, ge=0.0, le=100.0, description="classifier-free guidance (LLaDA); doubles nfe"
    )
    suppress_end: bool = Field(default=False, description="end tokens come last (LLaDA)")

    @property
    def draws_anew(self) -> bool:
        """Whether each step draws new random numbers; needless where the tokens drawn do not decide which masks are revealed."""
        return self.draws == "fresh" and self.confidence == "top1"

    @model_validator(mode="after")
    def _something_to_refresh(self) -> MaskedSettings:
        if self.refresh is not None and self.cache == "none":
            raise ValueError(
                f"decoder.refresh: {self.refresh}, but cache 'none' has nothing to refresh; allowed with it: null"
            )
        if self.guidance_scale and self.cache != "none":
            raise ValueError(
                f"decoder.guidance_scale: {self.guidance_scale:g} runs two canvases, and a cache holds one; allowed with cache "
                f"{self.cache!r}: 0"
            )
        return self


class StepwiseSettings(MaskedSettings):
    """Masked diffusion by a schedule (LLaDA, Dream); one token a step is the baseline of `ssd`."""

    tasks: ClassVar = ("infill", "complete", "score")
    scorer: ClassVar = "draftmill.decoders.masked.scoring:algorithm"
    estimates: ClassVar = ("llada", "mdlm")
    scores_any: ClassVar = True
    runs: ClassVar = "draftmill.decoders.masked.stepwise:algorithm"
    kind: Literal["stepwise"]
    tokens_per_step: int = Field(default=1, ge=1, description="tokens that a forward reveals; above 1 lossy")
    steps: Annotated[int, Field(ge=1)] | None = Field(default=None, description="instead: the number of forwards")
    schedule: Literal["even", "dream"] = Field(default="even", description="steps: dream is Dream's, without blocks")

    @model_validator(mode="after")
    def _one_schedule(self) -> StepwiseSettings:
        if self.steps is not None and self.tokens_per_step != 1:
            raise ValueError("decoder.steps: give tokens_per_step or steps, not both")
        if self.schedule == "dream" and self.steps is None:
            raise ValueError("decoder.steps: the schedule 'dream' needs the number of steps")
        if self.schedule == "dream" and self.block_length is not None:
            raise ValueError(
                f"decoder.block_length: {self.block_length}, but the schedule 'dream' has no blocks; allowed: null"
            )
        return self


class SelfSpeculativeSettings(MaskedSettings):
    """Self-speculative masked diffusion (SSD): the text and the order of `stepwise`, in fewer forwards."""

    draft_law: ClassVar = False
    runs: ClassVar = "draftmill.decoders.masked.ssd:algorithm"
    kind: Literal["ssd"]
    draft_length: int = Field(default=4, ge=1, le=64, description="N, most drafts of a chain of N + 1 canvases")
    tree: Literal["chain", "mixed"] = Field(default="chain", description="mixed: a tree of up to 2 N canvases")
    drafter: RunDrafterSettings | None = Field(
        default=None, description="finished runs give the tokens of drafts; null: the last forward"
    )

    @model_validator(mode="after")
    def _length_is_its_own(self) -> SelfSpeculativeSettings:
        if self.drafter is not None and self.drafter.k != "auto":
            raise ValueError(f"decoder.drafter.k: {self.drafter.k}, but drafts have decoder.draft_length; leave k out")
        return self


class ThresholdSettings(MaskedSettings):
    """Masked diffusion that reveals all tokens above a confidence threshold (Fast-dLLM); lossy."""

    runs: ClassVar = "draftmill.decoders.masked.stepwise:threshold"
    kind: Literal["threshold"]
    confidence: Literal["top1", "margin"] = Field(default="top1", description="a token's probability, or its lead")
    tau: float = Field(default=0.9, ge=0.0, le=1.0, description="reveal tokens this sure, and always the best")


class FactorSettings(MaskedSettings):
    """Masked diffusion that reveals more tokens at once the higher their confidences are (Fast-dLLM); lossy."""

    runs: ClassVar = "draftmill.decoders.masked.stepwise:factor"
    kind: Literal["factor"]
    confidence: Literal["top1", "margin"] = Field(default="top1", description="a token's probability, or its lead")
    factor: float = Field(default=1.0, gt=0.0, description="reveal the largest n: (n + 1) (1 - n-th confidence) < it")


class AncestralSettings(DecoderChoice):
    """Masked diffusion backwards in time (MDLM, SEDD): each step reveals masks at random; lossy with few steps."""

    runs_on: ClassVar[ModelKind] = "ancestral"
    tasks: ClassVar = ("infill", "complete", "score")
    scorer: ClassVar = "draftmill.decoders.masked.scoring:algorithm"
    estimates: ClassVar = ("mdlm", "llada")
    scores_any: ClassVar = True
    runs: ClassVar = "draftmill.decoders.masked.ancestral:algorithm"
    kind: Literal["ancestral"]
    steps: int = Field(default=128, ge=1, le=2**20, description="steps until no mask is left")
    predictor: Literal["auto", "ddpm", "analytic", "euler"] = Field(
        default="auto", description="ddpm is MDLM's, the others SEDD's"
    )

    def check_model(self, info: ModelInfo) -> None:
        self.predictor_for(info.family)

    def predictor_for(self, family: str) -> str:
        """The requested predictor, or the family's own; ValueError if the model does not support it."""
        allowed = _PREDICTORS.get(family, ("ddpm", "analytic", "euler"))
        if self.predictor == "auto":
            return allowed[0]
        if self.predictor not in allowed:
            raise ValueError(
                f"decoder.predictor: {self.predictor!r} does not run on models of family {family!r}; "
                f"allowed: auto, {', '.join(allowed)}"
            )
        return self.predictor
