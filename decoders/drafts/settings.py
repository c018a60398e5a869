"""Settings of the drafters that any family of models may use. Pydantic only, no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftmill.decoders.common_settings import Settings


class SuffixDrafterSettings(Settings):
    """Drafts what followed the longest end of a sample's text elsewhere in the texts of its worker (SuffixDecoding)."""

    kind: Literal["suffix"]
    max_tokens: int = Field(
        default=1 << 20, ge=1 << 10, le=1 << 28, description="the index holds the last N tokens, at least half of them"
    )
    max_spec_factor: float = Field(
        default=1.0, gt=0.0, le=64.0, allow_inf_nan=False, description="drafts at most N times the tokens that match"
    )
    min_token_prob: float = Field(
        default=0.1, ge=0.0, le=1.0, allow_inf_nan=False, description="drafts while all hold with this probability"
    )
