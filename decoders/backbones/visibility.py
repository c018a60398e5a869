"""Visibility rules: which columns of its slot a row sees. Pure functions over index tensors.

An any-subset model decodes the positions of a canvas in an *order* (decoders/engine/orders.py); the *rank* of a position is its
place in it. In a slot the columns of the cache are ranks, so a rule needs one number a row, its *limit*: the row sees the columns
< limit.

    columns (ranks)      0 1 2 | 3 4 5 6          m = 3 prompt tokens, n = 4 decided, drafts at ranks 4 and 5
    prompt content 0..2  x x x | . . . .          limit m: the prompt sees all of itself
    content of rank 4    x x x | x x . .          limit rank + 1: itself and what came before
    query, draft pass    x x x | x . . .          limit n, whatever its rank
    query, density pass  x x x | x x . .          limit = its own rank (here 5)
    query, stale (s=0)   x x x | x . . .          limit n + s for a rank beyond n + s

Sources: Guo and Ermon, "Reviving any-subset autoregressive models" (ASSD), sections on orders and Algorithm 1.

Legend: T rows of any kind.
"""

from __future__ import annotations

import torch
from torch import Tensor


def content_limits(columns_BC: Tensor, prompt_B: Tensor) -> Tensor:
    """Return how many columns each content row sees: itself and all before it; the prompt sees the whole prompt."""
    return torch.maximum(columns_BC + 1, prompt_B.unsqueeze(1))


def visible(limits_BT: Tensor, num_columns: int) -> Tensor:
    """Expand limits to a boolean mask [B, T, num_columns], True where the row sees the column."""
    return torch.arange(num_columns, device=limits_BT.device) < limits_BT.unsqueeze(-1)
