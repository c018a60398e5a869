"""Settings of the drafters that any family of models may use. Pydantic only, no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftmill.decoders.common_settings import Settings


class SuffixDrafterSettings(Settings):
    """Drafts what followed the longest end of a sample's text elsewhere in the texts of its worker (SuffixDecoding)."""

    kind: Literal["suffix"]
    max_tokens: int = Field(
        1 << 20, ge=1 << 10, le=1 << 28, description="the index holds this many last tokens, or at least half"
    )
    max_spec_factor: float = Field(
        1.0, gt=0.0, le=64.0, allow_inf_nan=False, description="drafts at most so many times the tokens that match"
    )
    min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, allow_inf_nan=False, description="drafts while all of them hold with this probability"
    )
