"""The lane of a masked-diffusion model that drafts for another model: each forward runs whole windows, nothing is cached."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.token_lanes import TokenLane


class WindowLane(TokenLane):
    """A token that the model does not know reads as a mask; ids that it never generates are impossible drafts."""

    def __init__(self, setup: Setup, windows: Literal["short", "full"]) -> None:
        drafter, info = setup.drafter, setup.drafter_info
        assert drafter is not None and info is not None and info.mask_id is not None, "a drafting model with a mask"
        super().__init__(drafter, setup.info.vocab_size, is_target=False)
        self._info, self._is_full, self._mask_id = info, windows == "full", info.mask_id
        never = [token for token in sorted({*info.suppressed, info.mask_id}) if token < setup.info.vocab_size]
        self._never = torch.tensor(never, dtype=torch.int64, device=self.device)

    @property
    def can_capture(self) -> bool:
        """See Lane. Whole texts run, which keep a device busy."""
        return False

    @property
    def cell_bytes(self) -> int:
        """See Lane; with the activations of a row, since all rows of a window run each time."""
        return super().cell_bytes + int(getattr(self.backbone, "row_bytes", 0))

    def resize(self, num_slots: int, num_columns: int) -> None:
        """See Lane; room for windows, not for canvases."""
        super().resize(num_slots, self._width(num_columns) if num_slots else 0)

    def _width(self, num_columns: int) -> int:
        longest = self._info.max_length
        if longest is None:
            return num_columns
        return longest if self._is_full else min(num_columns, longest)

    def start(self, sample: Sample) -> None:
        """Nothing is kept between forwards."""

    def embed(self, tokens_R: Tensor) -> Tensor:
        """See Lane."""
        return super().embed(torch.where(tokens_R < self.backbone.vocab_size, tokens_R, self._mask_id))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See Lane."""
        return super().logits(hidden_RD).index_fill(-1, self._never, -torch.inf)
