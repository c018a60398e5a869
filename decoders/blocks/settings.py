"""Settings of the block-diffusion decoders: how a block is denoised, and how S2D2 verifies its drafts.

Pure pydantic, without torch. Sources: SDAR (Cheng et al., 2025), Fast-dLLM v2 (Wu et al., 2025), LLaDA2.1 (editing), S2D2, and
Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking" (2025).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.blocks.router_settings import Entropy, Estimator, MinSpan, Router, VerificationCost
from draftmill.decoders.common_settings import DecoderChoice, Sampling

_Count = Annotated[int, Field(ge=1, le=2**20)]


class BlockSettings(DecoderChoice):
    """What the decoders of block-diffusion models share.

    A step's share of masks: the most confident (`static`), all with confidence above `tau` if those are at least as many
    (`dynamic`), or the leftmost (`sequential`); `entropy` ignores the share and reveals the masks of least entropy, while the
    entropies before the last one sum up to at most `tau` nats.
    """

    runs_on: ClassVar[ModelKind] = "blocks"
    tasks: ClassVar[tuple[Literal["infill", "complete", "score"], ...]] = ("complete",)
    draws_by_row: ClassVar = False
    block_size: _Count | None = Field(default=None, description="positions of a block; null: the size used in training")
    schedule: Literal["static", "dynamic", "sequential", "entropy"] = Field(
        default="dynamic", description="which masks a step reveals"
    )
    steps: _Count | None = Field(default=None, description="denoising steps of a block; null: one per position")
    tau: float = Field(
        default=0.9, ge=0.0, allow_inf_nan=False, description="threshold of dynamic (confidence) and entropy (nats)"
    )
    sub_block: _Count | None = Field(default=None, description="denoise blocks in parts of N positions, left to right")
    tau_edit: float | None = Field(
        default=None, ge=0.0, allow_inf_nan=False, description="replace a revealed token if another exceeds this"
    )
    post_steps: int = Field(default=16, ge=0, le=2**20, description="with tau_edit: most steps after the last mask")
    causal_cache: bool = Field(default=False, description="prompt and finished blocks see only what is to their left")
    fused: bool = Field(default=False, description="draft a block in the forward that adds what is before it")
    draws: Literal["fresh", "kept"] = Field(default="fresh", description="draw masks anew each step, or keep noise")

    @property
    def draws_anew(self) -> bool:
        """Whether each step has random numbers of its own; needless where what is drawn does not decide what is revealed."""
        return self.draws == "fresh" and (self.schedule in {"static", "dynamic"} or self.tau_edit is not None)

    def check_sampling(self, sampling: Sampling) -> None:
        """See DecoderChoice; also ValueError if positions are to keep random numbers that the rejection rule draws anew."""
        super().check_sampling(sampling)
        if self.draws == "kept" and sampling.acceptance == "rejection":
            raise ValueError(
                "decoder.draws: 'kept', but sampling.acceptance 'rejection' draws anew in each step; allowed with it: 'fresh'"
            )

    @property
    def drafts_in_verifications(self) -> bool:
        """Whether verifications also draft, so that no forward only drafts."""
        return False

    def size_for(self, info: ModelInfo) -> int:
        """The size in the settings, else the size used in training; ValueError if neither is known, or sub-blocks don't fit."""
        size = self.block_size or info.block_size
        if size is None:
            raise ValueError(
                f"decoder.block_size: models of family {info.family!r} don't specify it; allowed: a number"
            )
        if self.sub_block is not None and size % self.sub_block:
            raise ValueError(
                f"decoder.sub_block: {self.sub_block} does not divide block_size = {size}; allowed: its divisors"
            )
        return size

    def check_model(self, info: ModelInfo) -> None:
        self.check_steps(self.size_for(info))
        if self.fused and info.shift and not self.drafts_in_verifications:
            raise ValueError(
                f"decoder.fused: true does not work with family {info.family!r}, which predicts the first token of a block in "
                "the forward before it; allowed: false, or s2d2 over a causal cache that verifies always, without sub_block, "
                "tau_edit and paper_compat"
            )

    def check_steps(self, size: int) -> None:
        """Raise ValueError if a block of `size`, or its sub-blocks, can't have so many denoising steps."""

    @model_validator(mode="after")
    def _fits_blocks(self) -> BlockSettings:
        if self.block_size is not None and self.sub_block is not None and self.block_size % self.sub_block:
            raise ValueError(
                f"decoder.sub_block: {self.sub_block} does not divide block_size = {self.block_size}; allowed: its divisors"
            )
        if self.block_size is not None:
            self.check_steps(self.block_size)
        return self


class BlockDiffusionSettings(BlockSettings):
    """Denoises block after block (SDAR, Fast-dLLM v2, LLaDA2); lossy with more than one token per step."""

    tasks: ClassVar = ("complete", "score")
    scorer: ClassVar = "draftmill.decoders.blocks.scoring:algorithm"
    estimates: ClassVar = ("llada",)
    scored_with: ClassVar = ("block_size", "causal_cache")
    runs: ClassVar = "draftmill.decoders.blocks.block_diffusion:algorithm"
    kind: Literal["block_diffusion"]


class S2d2Settings(BlockSettings):
    """Self-speculation: the same model verifies a block's drafts at block size 1, when the router decides so.

    A router that verifies every span needs a step for every position; with another one, `steps` add unverified drafts to what a
    verification reveals, as in SDAR's public code. `causal_draft` is the paper's equation 4.
    """

    runs: ClassVar = "draftmill.decoders.blocks.s2d2:algorithm"
    kind: Literal["s2d2"]
    router: Router = Field(default=MinSpan(kind="min_span"), description="whether a drafted span is verified")
    estimator: Estimator = Field(default=Entropy(kind="entropy"), description="how likely a draft is accepted")
    cost: VerificationCost = Field(default=VerificationCost(), description="how many tokens a verification must gain")
    temper: float = Field(default=1.0, gt=0.0, allow_inf_nan=False, description="power of the ratio p/q, if it is used")
    causal_draft: bool = Field(default=False, description="draft with the decided front of the block run causally")
    paper_compat: bool = Field(default=False, description="at temperature 0: untempered, as the public code")

    @property
    def verifies_always(self) -> bool:
        """Whether every token comes from a verification."""
        return isinstance(self.router, MinSpan) and self.router.span == 1

    def check_steps(self, size: int) -> None:
        size = self.sub_block or size
        if self.verifies_always and self.steps is not None and self.steps < size:
            raise ValueError(
                f"decoder.steps: {self.steps} for {size} positions makes a step reveal {-(-size // self.steps)} tokens, verified "
                f"or not, but the router verifies every token; allowed: null or at least {size}; with fewer steps, a router that "
                "verifies only some spans (lossy), or block_diffusion"
            )

    @property
    def draws_anew(self) -> bool:
        """See BlockSettings. A token that a verification gives is drawn once, from left to right, whatever was drafted before."""
        return self.draws == "fresh" and not (self.verifies_always and self.tau_edit is None)

    @property
    def drafts_in_verifications(self) -> bool:
        """Whether a verification can also draft: no schedule reveals anything, and the cache that it leaves is correct."""
        parts = self.sub_block is not None or self.tau_edit is not None or self.paper_compat
        return self.fused and self.causal_cache and self.verifies_always and not parts

    def check_sampling(self, sampling: Sampling) -> None:
        """See DecoderChoice; also ValueError if `temper` is set but no ratio p/q is used."""
        super().check_sampling(sampling)
        by_ratio = self.paper_compat if sampling.temperature == 0.0 else sampling.acceptance == "rejection"
        if self.temper != 1.0 and not by_ratio:
            raise ValueError(
                f"decoder.temper: {self.temper:g} is the power of the ratio p/q, which only sampling.acceptance 'rejection' "
                "above temperature 0, or paper_compat at temperature 0, uses; allowed otherwise: 1"
            )
