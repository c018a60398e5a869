"""What every settings model shares, and how tokens are drawn: `sampling:` in a spec. Pure pydantic, without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every settings model: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Settings):
    """How a token is drawn from the model's logits; the same warp is applied to target and draft."""

    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    acceptance: Literal["coupled", "rejection"] = "coupled"
