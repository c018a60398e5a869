"""Settings of the block-diffusion decoders: how a block is denoised, when S2D2 verifies a drafted span; and what follows
from both with a model (`Rules`).

    decoder:
      kind: s2d2
      router: {kind: hysteresis, on: 1.0, off: -5.0}
      estimator: {kind: entropy, beta: 1.0}      how likely a drafted token is accepted
      cost: {kind: dynamic, c: 1.0}

Pure pydantic, without torch. block_diffusion.py and verifier.py name the sources; thresholds compare as in S2D2's public code.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from draftmill.decoders.base import ModelInfo, ModelKind
from draftmill.decoders.common_settings import (
    DecoderChoice,
    DrafterPlace,
    Head,
    RunDrafterSettings,
    Sampling,
    Settings,
    Tasks,
)
from draftmill.decoders.draws.settings import Note

_Count = Annotated[int, Field(ge=1, le=2**20)]
_Bins = Annotated[int, Field(ge=1, le=64)]


class MinSpan(Settings):
    """Verify a span of at least `span` tokens; 1 means always."""

    kind: Literal["min_span"]
    span: int = Field(default=1, ge=1, le=2**20, description="tokens of the shortest verified span")


class ScoreRouter(Settings):
    """Verify where the score (expected accepted tokens less their cost) is at least `tau`."""

    kind: Literal["score"]
    tau: float = Field(default=0.0, description="least score")


class Hysteresis(Settings):
    """Start to verify at a score above `on`, stop at a score below `off`; a sample starts without verification."""

    kind: Literal["hysteresis"]
    on: float = Field(default=0.0, description="verify from above this score")
    off: float = Field(default=-1.0, description="stop below this score")

    @model_validator(mode="after")
    def _check_order(self) -> Hysteresis:
        if self.off >= self.on:
            raise ValueError(f"decoder.router.off: {self.off:g} is not below on = {self.on:g}; allowed: below on")
        return self


class Bandit(Settings):
    """Learn within each sample what pays (UCB), by span, progress and entropy (of the span, or of the block's masks)."""

    kind: Literal["bandit"]
    beta: float = Field(default=1.0, ge=0.0, description="weight of the bonus of rare actions")
    span_bins: _Bins = Field(default=2, description="bins of span lengths")
    progress_bins: _Bins = Field(default=2, description="bins of progress")
    entropy_bins: _Bins = Field(default=2, description="bins of entropies")
    entropy_of: Literal["span", "masks"] = Field(default="span", description="the mean over a span or a block's masks")


Router = Annotated[MinSpan | ScoreRouter | Hysteresis | Bandit, Field(discriminator="kind")]


# ---- estimators: how likely a drafted token is accepted (`alpha`), by the `note` of its row --------------------------


class Entropy(Settings):
    """exp(-beta H / log V), with the entropy H of the draft distribution."""

    kind: Literal["entropy"]
    beta: float = Field(default=1.0, ge=0.0, description="weight of the entropy")
    note: ClassVar[Note] = "entropy"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return math.exp(-self.beta * measured / most_entropy)


class Margin(Settings):
    """1 where the best token leads the second by more than `tau`, else 0."""

    kind: Literal["margin"]
    tau: float = Field(default=0.05, ge=0.0, le=1.0, description="the lead")
    note: ClassVar[Note] = "margin"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return float(measured > self.tau)


class LinearMargin(Settings):
    """The best token's lead over the second times `coefficient`, at most 1."""

    kind: Literal["linear_margin"]
    coefficient: float = Field(default=1.0, ge=0.0, description="weight of the lead")
    note: ClassVar[Note] = "margin"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return min(self.coefficient * measured, 1.0)


class Confidence(Settings):
    """The drafted token's probability to the `power`."""

    kind: Literal["confidence"]
    power: float = Field(default=1.0, ge=0.0, description="exponent of the probability")
    note: ClassVar[Note] = "top1"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return min(measured, 1.0) ** self.power


class Renyi(Settings):
    """The sum of the squared probabilities: the chance that two draws agree."""

    kind: Literal["renyi"]
    note: ClassVar[Note] = "squares"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return min(measured, 1.0)


class HardEntropy(Settings):
    """1 where H / log V is below `tau`, else 0."""

    kind: Literal["hard_entropy"]
    tau: float = Field(default=0.5, ge=0.0, description="the normalised entropy")
    note: ClassVar[Note] = "entropy"

    def alpha(self, measured: float, most_entropy: float) -> float:
        return float(measured / most_entropy < self.tau)


Estimator = Annotated[Entropy | Margin | LinearMargin | Confidence | Renyi | HardEntropy, Field(discriminator="kind")]


class VerificationCost(Settings):
    """The gain that a verification must reach: `c` tokens (static), or `c` per token revealed without it (dynamic)."""

    kind: Literal["static", "dynamic"] = Field(
        default="static", description="c tokens, or c for each token that is revealed without it"
    )
    c: float = Field(default=1.0, ge=0.0, description="number of tokens")


class BlockSettings(DecoderChoice):
    """What the decoders of block-diffusion models share.

    The first `steps` take the remainder. block_diffusion.py describes each `schedule`; `entropy` ignores `steps`. With `draws:
    kept` a position keeps its random numbers over all steps, which is another distribution where drawn tokens decide what is
    revealed, routed or edited, and the same elsewhere.
    """

    runs_on: ClassVar[ModelKind] = "blocks"
    tasks: ClassVar[Tasks] = ("complete",)
    draws_by_row: ClassVar = False
    block_size: _Count | None = Field(default=None, description="positions of a block; null: the size used in training")
    schedule: Literal["static", "dynamic", "sequential", "entropy"] = Field(
        default="dynamic", description="which masks a step reveals"
    )
    steps: _Count | None = Field(default=None, description="denoising steps of a block; null: one per position")
    tau: float = Field(default=0.9, ge=0.0, description="threshold of dynamic and entropy")
    sub_block: _Count | None = Field(default=None, description="denoise blocks in parts of N positions")
    tau_edit: float | None = Field(default=None, ge=0.0, description="replace a revealed token if another exceeds this")
    post_steps: int = Field(default=16, ge=0, le=2**20, description="with tau_edit: steps after the last mask")
    causal_cache: bool = Field(default=False, description="finished blocks see only what is to their left")
    fused: bool = Field(default=False, description="draft a block in the forward that adds what is before it")
    draws: Literal["fresh", "kept"] = Field(default="fresh", description="draw masks anew each step, or keep noise")

    @property
    def draws_anew(self) -> bool:
        """Whether each step draws new random numbers; needless where the tokens drawn do not decide which masks are revealed."""
        decides = self.schedule in {"static", "dynamic"} and self.block_size != 1
        return self.draws == "fresh" and (decides or self.tau_edit is not None)

    def check_sampling(self, sampling: Sampling) -> None:
        """See DecoderChoice; also ValueError if positions are to keep random numbers that the rejection rule draws anew."""
        super().check_sampling(sampling)
        if self.tau_edit is not None and sampling.reads_text:
            raise ValueError(
                f"sampling.{sampling.reads_text[0]}: depends on the tokens so far, which decoder.tau_edit may replace; allowed: "
                "only one of them"
            )
        if self.draws == "kept" and sampling.acceptance == "rejection":
            raise ValueError(
                "decoder.draws: 'kept', but sampling.acceptance 'rejection' draws anew in each step; allowed with it: 'fresh'"
            )

    @property
    def drafts_in_verifications(self) -> bool:
        """Whether verifications also draft, so that no forward only drafts."""
        return False

    def size_for(self, info: ModelInfo) -> int:
        """The size in the settings, else the size used in training; ValueError if neither is known, or see `check_size`."""
        size = self.block_size or info.block_size
        if size is None:
            raise ValueError(
                f"decoder.block_size: models of family {info.family!r} don't specify it; allowed: a number"
            )
        self.check_size(size)
        return size

    def check_size(self, size: int) -> None:
        """Raise ValueError if a block of `size` can't be divided into these sub-blocks, or into these denoising steps."""
        if self.sub_block is not None and size % self.sub_block:
            raise ValueError(
                f"decoder.sub_block: {self.sub_block} does not divide block_size = {size}; allowed: its divisors"
            )

    def check_model(self, info: ModelInfo) -> None:
        self.size_for(info)
        seeds = info.shift or (_left_shift(info) and self.causal_cache)
        if self.fused and seeds and not self.drafts_in_verifications:
            raise ValueError(
                f"decoder.fused: true does not work with family {info.family!r}, which predicts the first token of a block in "
                "the forward before it; allowed: false, or s2d2 over a causal cache that verifies always, without sub_block, "
                "tau_edit and paper_compat"
            )

    @model_validator(mode="after")
    def _fits_blocks(self) -> BlockSettings:
        if self.block_size is not None:
            self.check_size(self.block_size)
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
    """Self-speculation: what a block drafts is verified by the same model at block size 1, where the router says so. With a
    `drafter` a smaller block-diffusion model fills in `block_size` masks after the text, in one forward, and each verification
    is followed by a new draft."""

    runs: ClassVar = "draftmill.decoders.blocks.s2d2:algorithm"
    kind: Literal["s2d2"]
    router: Router = Field(default=MinSpan(kind="min_span"), description="whether a drafted span is verified")
    estimator: Estimator = Field(default=Entropy(kind="entropy"), description="how likely a draft is accepted")
    cost: VerificationCost = Field(default=VerificationCost(), description="how many tokens a verification must gain")
    temper: float = Field(default=1.0, gt=0.0, description="power of the ratio p/q, if it is used")
    causal_draft: bool = Field(default=False, description="draft with the decided front of the block run causally")
    paper_compat: bool = Field(default=False, description="at temperature 0: untempered, as the public code")
    drafter: DrafterPlace | RunDrafterSettings | None = Field(
        default=None, description="a block-diffusion model that drafts, or finished runs; null: the model itself"
    )
    head: Head = Field(default="auto", description="with fused, auto: the model's own; none; or a draft head's folder")

    @property
    def keeps_bits(self) -> bool:
        return False

    @property
    def draft_head(self) -> str:
        return self.head if self.drafts_in_verifications else "none"

    def check_model(self, info: ModelInfo) -> None:
        super().check_model(info)
        if _left_shift(info) != info.shift and not self.causal_cache:
            raise ValueError(
                f"decoder.causal_cache: false, but models of family {info.family!r} verify over causal blocks only; allowed: true"
            )

    @property
    def verifies_always(self) -> bool:
        """Whether every token comes from a verification."""
        return isinstance(self.router, MinSpan) and self.router.span == 1

    def check_size(self, size: int) -> None:
        super().check_size(size)
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
        return self.fused and self.leaves_text

    @property
    def leaves_text(self) -> bool:
        """Whether a verification leaves nothing in the text or in the cache but what is decided."""
        parts = self.sub_block is not None or self.tau_edit is not None or self.paper_compat
        return self.causal_cache and self.verifies_always and not parts

    @model_validator(mode="after")
    def _drafter_fits(self) -> S2d2Settings:
        if self.head not in {"auto", self.draft_head}:
            raise ValueError(
                f"decoder.head: {self.head!r} drafts in verifications; allowed with it: fused true and causal_cache true, no "
                "router, sub_block, tau_edit and paper_compat"
            )
        if self.drafter is not None and (self.fused or not self.leaves_text):
            shown = repr(self.drafter.path) if isinstance(self.drafter, DrafterPlace) else "a run"
            raise ValueError(
                f"decoder.drafter: {shown} drafts where every token is verified over a causal cache; allowed with "
                "it: causal_cache true, fused false, no router, sub_block, tau_edit and paper_compat"
            )
        return self

    def check_sampling(self, sampling: Sampling) -> None:
        """See DecoderChoice; also ValueError if `temper` is set but no ratio p/q is used."""
        super().check_sampling(sampling)
        by_ratio = self.paper_compat if sampling.temperature == 0.0 else sampling.acceptance == "rejection"
        if self.temper != 1.0 and not by_ratio:
            raise ValueError(
                f"decoder.temper: {self.temper:g} is the power of the ratio p/q, which only sampling.acceptance 'rejection' "
                "above temperature 0, or paper_compat at temperature 0, uses; allowed otherwise: 1"
            )


def _left_shift(info: ModelInfo) -> int:
    return info.shift if info.left_shift is None else info.left_shift


class Rules:
    """The settings of a block decoder and what it needs to know of its model, as plain numbers.

    Blocks of `size`, denoised in parts of `sub_block`; with `prompt_block` they begin at the prompt's end, and the prompt is one.
    `mask` is the id of a mask, `shift` is 1 in models in which a row predicts the next token, `left_shift` the same for rows that
    see only to their left. `grain` is how far a decided token sees: to the end of its block, or to itself (1). With `fresh` each
    step draws all masks anew. `most_entropy` is the logarithm of the vocabulary.
    """

    def __init__(self, settings: BlockSettings, info: ModelInfo) -> None:
        """Raises ValueError, with the field path, where settings and model do not fit."""
        settings.check_model(info)
        assert info.mask_id is not None, "families of this kind have a mask"
        self.settings, self.size, self.mask = settings, settings.size_for(info), info.mask_id
        self.shift, self.left_shift, self.prompt_block = info.shift, _left_shift(info), info.prompt_block
        self.sub_block, self.grain = settings.sub_block or self.size, 1 if settings.causal_cache else self.size
        self.causal_draft = isinstance(settings, S2d2Settings) and settings.causal_draft
        self.fresh, self.most_entropy = settings.draws_anew, max(math.log(info.vocab_size), 1e-12)
        self._max_length = info.max_length
        # Whether the last row of decided blocks predicts the first token after them.
        self.predicts_next = bool(self.shift or (self.left_shift and self.grain == 1))

    def start(self, prompt: int) -> int:
        """Where the first block begins that is to be filled."""
        return prompt if self.prompt_block else prompt // self.size * self.size

    def full(self, length: int, prompt: int) -> int:
        """Where the last block of a canvas ends."""
        start = self.start(prompt)
        whole = start + -(-(length - start) // self.size) * self.size
        return whole if self._max_length is None else max(min(whole, self._max_length), length)

    def columns(self, length: int) -> int:
        """The most columns of a canvas: copies come after the last block, and a block that is cut short has room for as many
        as any other."""
        whole = length + self.size - 1 if self.prompt_block else self.full(length, 0)
        return whole + 2 * self.size

    @property
    def takes_all_steps(self) -> bool:
        """Whether there is a step for every place."""
        return self.settings.steps is None or self.settings.steps >= self.sub_block
