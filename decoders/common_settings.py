"""The base of every settings model, apart from the decoders' own so that those may lie in several files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings model: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
