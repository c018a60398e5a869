"""Settings of S2D2's routing: when to verify a drafted span, and how to estimate its acceptance.

    decoder:
      kind: s2d2
      router: {kind: hysteresis, on: 1.0, off: -5.0}
      estimator: {kind: entropy, beta: 1.0}
      cost: {kind: dynamic, c: 1.0}

Pure pydantic, without torch. Source: Han et al., "Fast decoding for diffusion LLMs via training-free self-speculation" (S2D2,
2026); the thresholds compare as in its public code (decoders/blocks/routers.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftmill.decoders.common_settings import Settings

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Bins = Annotated[int, Field(ge=1, le=64)]


# ---- routers ---------------------------------------------------------------------------------------------------------


class MinSpan(Settings):
    """Verify a span of at least `span` tokens; 1 means always."""

    kind: Literal["min_span"]
    span: int = Field(default=1, ge=1, le=2**20, description="tokens of the shortest verified span")


class ScoreRouter(Settings):
    """Verify where the score (expected accepted tokens less their cost) is at least `tau`."""

    kind: Literal["score"]
    tau: _Number = Field(default=0.0, description="least score")


class Hysteresis(Settings):
    """Start to verify at a score above `on`, stop at a score below `off`; a sample starts without verification."""

    kind: Literal["hysteresis"]
    on: _Number = Field(default=0.0, description="verify from above this score")
    off: _Number = Field(default=-1.0, description="stop below this score")

    @model_validator(mode="after")
    def _ordered(self) -> Hysteresis:
        if self.off >= self.on:
            raise ValueError(f"decoder.router.off: {self.off:g} is not below on = {self.on:g}; allowed: below on")
        return self


class Bandit(Settings):
    """Learn within each sample what pays (UCB), separately for bins of span, progress and entropy."""

    kind: Literal["bandit"]
    beta: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="weight of the bonus of rare actions")
    span_bins: _Bins = Field(default=2, description="bins of span lengths")
    progress_bins: _Bins = Field(default=2, description="bins of progress")
    entropy_bins: _Bins = Field(default=2, description="bins of entropies")
    entropy_of: Literal["span", "masks"] = Field(default="span", description="the mean over a span or a block's masks")


Router = Annotated[MinSpan | ScoreRouter | Hysteresis | Bandit, Field(discriminator="kind")]


# ---- estimators: how likely a drafted token is accepted --------------------------------------------------------------


class Entropy(Settings):
    """exp(-beta H / log V), with the entropy H of the draft distribution."""

    kind: Literal["entropy"]
    beta: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="weight of the entropy")


class Margin(Settings):
    """1 where the best token leads the second by more than `tau`, else 0."""

    kind: Literal["margin"]
    tau: float = Field(default=0.05, ge=0.0, le=1.0, allow_inf_nan=False, description="the lead")


class LinearMargin(Settings):
    """The best token's lead over the second times `coefficient`, at most 1."""

    kind: Literal["linear_margin"]
    coefficient: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="weight of the lead")


class Confidence(Settings):
    """The drafted token's probability to the `power`."""

    kind: Literal["confidence"]
    power: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="exponent of the probability")


class Renyi(Settings):
    """The sum of the squared probabilities: the chance that two draws agree."""

    kind: Literal["renyi"]


class HardEntropy(Settings):
    """1 where H / log V is below `tau`, else 0."""

    kind: Literal["hard_entropy"]
    tau: float = Field(default=0.5, ge=0.0, allow_inf_nan=False, description="the normalised entropy")


Estimator = Annotated[Entropy | Margin | LinearMargin | Confidence | Renyi | HardEntropy, Field(discriminator="kind")]


# ---- cost ------------------------------------------------------------------------------------------------------------


class VerificationCost(Settings):
    """The gain that a verification must reach: `c` tokens (static), or `c` per token revealed without it (dynamic)."""

    kind: Literal["static", "dynamic"] = Field(
        default="static", description="c tokens, or c for each token that is revealed without it"
    )
    c: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="number of tokens")
