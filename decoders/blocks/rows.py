"""Builds the rows of one forward over slots in different phases of block diffusion.

Every phase is a stretch of columns with a limit for each row. A row sees the columns below its limit, and its own:

    phase     columns                       a row sees
    prefill   0 .. start                    its block and those before it; with a causal cache the columns to its left
    draft     start .. end                  up to the end of the block; a causal front the columns to its left
    verify    start .. span's end           the columns to its left: the drafts stand in the span
              copies after the block        the columns to the left of the position that it copies, as a mask
    commit    start .. end                  as in a prefill

A copy predicts a position from the tokens to its left. A mask inside of the draft cannot, since the draft's own token stands
there. Models that predict the next token need copies only for position 0.

Pure; knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from decoders.backbones.base import TokenRows

_FIELDS: Final = ("tokens_BT", "positions_BT", "columns_BT", "limits_BT", "valid_BT")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some rows of every slot: each sees the columns below its limit and its own; if `together`, the columns of all of them."""

    tokens_BT: Tensor
    positions_BT: Tensor
    columns_BT: Tensor
    limits_BT: Tensor
    valid_BT: Tensor
    together: bool = False

    def trimmed(self) -> Stretch:
        """Without the last places that are padding in every slot; keeps at least one."""
        length = max(
            int((self.valid_BT * torch.arange(1, self.valid_BT.shape[1] + 1, device=self.valid_BT.device)).max()), 1
        )
        return replace(self, **{name: getattr(self, name)[:, :length] for name in _FIELDS})


def lined_up(slots_B: Tensor, stretches: list[Stretch]) -> TokenRows:
    """One forward over stretches that follow each other."""
    fields = {name: torch.cat([getattr(one, name) for one in stretches], 1) for name in _FIELDS}
    columns_BT, valid_BT = fields["columns_BT"].masked_fill(~fields["valid_BT"], 0), fields["valid_BT"]
    limits_BT = fields["limits_BT"].masked_fill(~valid_BT, 0)
    width = int(torch.maximum(limits_BT, columns_BT + 1).max())
    columns_W = torch.arange(width, device=slots_B.device)
    visible_BTW = (columns_W < limits_BT.unsqueeze(2)) | (columns_W == columns_BT.unsqueeze(2))
    first = 0
    for one in stretches:
        last = first + one.valid_BT.shape[1]
        if one.together:
            held_BTW = (columns_W == one.columns_BT.unsqueeze(2)) & one.valid_BT.unsqueeze(2)
            visible_BTW[:, first:last] |= held_BTW.any(1, keepdim=True)
        first = last
    return TokenRows(
        slots_B=slots_B,
        tokens_BT=fields["tokens_BT"].masked_fill(~valid_BT, 0),
        positions_BT=fields["positions_BT"].masked_fill(~valid_BT, 0),
        columns_BT=columns_BT,
        valid_BT=valid_BT,
        visible_BTW=visible_BTW,
    )


def finished(tokens_BT: Tensor, positions_BT: Tensor, valid_BT: Tensor, *, size: int, causal: bool) -> Stretch:
    """Rows over decided blocks: a prefill or a commit."""
    ends_BT = positions_BT + 1 if causal else (positions_BT // size + 1) * size
    return Stretch(tokens_BT, positions_BT, positions_BT, ends_BT, valid_BT)
