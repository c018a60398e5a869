"""The settings of a block decoder and what it needs to know of its model, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.blocks.settings import BlockSettings, S2d2Settings


@dataclass(frozen=True, slots=True)
class Rules:
    """Blocks of `size`, denoised in parts of `sub_block`; `mask` is the id of a mask, `shift` is 1 in models in which a row
    predicts the next token. `grain` is how far a decided token sees: to the end of its block, or to itself (1). With `fresh`
    each step draws all masks anew. `most_entropy` is the logarithm of the vocabulary."""

    size: int
    sub_block: int
    mask: int
    shift: int
    grain: int
    schedule: str
    steps: int | None
    tau: float
    tau_edit: float | None
    post_steps: int
    fused: bool
    causal_draft: bool
    fresh: bool
    most_entropy: float
    max_length: int | None

    @classmethod
    def of(cls, settings: BlockSettings, info: ModelInfo) -> Rules:
        """Raises ValueError, with the field path, where settings and model do not fit."""
        settings.check_model(info)
        size = settings.size_for(info)
        if info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {info.family!r} have no mask to start from")
        return cls(
            size=size,
            sub_block=settings.sub_block or size,
            mask=info.mask_id,
            shift=info.shift,
            grain=1 if settings.causal_cache else size,
            schedule=settings.schedule,
            steps=settings.steps,
            tau=settings.tau,
            tau_edit=settings.tau_edit,
            post_steps=settings.post_steps,
            fused=settings.fused,
            causal_draft=isinstance(settings, S2d2Settings) and settings.causal_draft,
            fresh=settings.draws_anew,
            most_entropy=max(math.log(info.vocab_size), 1e-12),
            max_length=info.max_length,
        )

    def full(self, length: int) -> int:
        """Where the last block of a canvas ends."""
        whole = -(-length // self.size) * self.size
        return whole if self.max_length is None else max(min(whole, self.max_length), length)

    def columns(self, length: int) -> int:
        """The columns of a canvas: copies come after the last block, and a block that is cut short has as many as any other."""
        return self.full(length) + 2 * self.size

    @property
    def takes_all_steps(self) -> bool:
        """Whether there is a step for every place."""
        return self.steps is None or self.steps >= self.sub_block
