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

    Blocks of `block_size` positions (null: the size used in training) are finished one after the other. Each has `steps`
    denoising steps (null: one per position) that reveal equally many masks; the first steps take the remainder. `schedule`
    chooses the masks: the most confident (`static`); all with confidence above `tau` if those are at least as many (`dynamic`);
    the leftmost (`sequential`); those of least entropy, while the entropies before the last one sum up to at most `tau` nats
    (`entropy`, which ignores `steps`). With `sub_block` each block is denoised in parts of that many positions, from left to
    right. With `tau_edit` a revealed token is replaced by another whose probability exceeds it, in up to `post_steps` more steps
    after the last mask. With `causal_cache` finished tokens see only those to their left, as in a causal model. With `fused` the
    prompt and finished blocks run together with the draft of the next block instead of in forwards of their own. With `draws:
    fresh` each step draws all masks anew, as the public samplers do; with `kept` a position keeps its random numbers over all
    steps, which is another distribution where drawn tokens decide what is revealed, routed or edited, and the same elsewhere.
    """

    runs_on: ClassVar[ModelKind] = "blocks"
    tasks: ClassVar[tuple[Literal["infill", "complete", "score"], ...]] = ("complete",)
    draws_by_row: ClassVar = False
    block_size: _Count | None = None
    schedule: Literal["static", "dynamic", "sequential", "entropy"] = "dynamic"
    steps: _Count | None = None
    tau: float = Field(default=0.9, ge=0.0, allow_inf_nan=False)
    sub_block: _Count | None = None
    tau_edit: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    post_steps: int = Field(default=16, ge=0, le=2**20)
    causal_cache: bool = False
    fused: bool = False
    draws: Literal["fresh", "kept"] = "fresh"

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

    `temper` is the power of the ratio p/q under sampling.acceptance 'rejection'. With `causal_draft` a drafting forward runs the
    decided front of the block causally (equation 4). `paper_compat` follows the public code at temperature 0: it accepts by the
    ratio of the untempered distributions, and draws the recovered token. `fused` also drafts in the verifications; it requires a
    causal cache and a router that verifies every span, without sub-blocks, editing and paper_compat. A router that verifies every
    span needs a step for every position; with another one, `steps` add unverified drafts to what a verification reveals, as in
    SDAR's public code.
    """

    runs: ClassVar = "draftmill.decoders.blocks.s2d2:algorithm"
    kind: Literal["s2d2"]
    router: Router = MinSpan(kind="min_span")
    estimator: Estimator = Entropy(kind="entropy")
    cost: VerificationCost = VerificationCost()
    temper: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    causal_draft: bool = False
    paper_compat: bool = False

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
