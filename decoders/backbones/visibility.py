"""Decoding orders and visibility rules: who may see whom. Pure functions over index tensors.

An any-subset model decodes the positions of a canvas in an *order*; the *rank* of a position is its place in it. In a slot
the columns of the cache are ranks, so a rule needs one number a row, its *limit*: the row sees the columns < limit.

    columns (ranks)      0 1 2 | 3 4 5 6          m = 3 prompt tokens, n = 4 decided, drafts at ranks 4 and 5
    prompt content 0..2  x x x | . . . .          limit m: the prompt sees all of itself
    content of rank 4    x x x | x x . .          limit rank + 1: itself and what came before
    query, draft pass    x x x | x . . .          limit n, whatever its rank
    query, density pass  x x x | x x . .          limit = its own rank (here 5)
    query, stale (s=0)   x x x | x . . .          limit n + s for a rank beyond n + s

Sources: Guo and Ermon, "Reviving any-subset autoregressive models" (ASSD), sections on orders and Algorithm 1.

Legend: B slots, L canvas length, C content rows, Q query rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.base import HOLE


def decoding_order(
    canvas: NDArray[np.int32], hole_order: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], int]:
    """Return (position at each rank, number of prompt tokens): prompt positions first, then the holes from left to right.

    This is the binary-lattice rule: one order for each pattern of holes, so that a density is defined once. `hole_order`
    replaces the order of the holes; it must be a permutation of them.
    """
    is_hole = canvas == HOLE
    prompt, holes = np.flatnonzero(~is_hole), np.flatnonzero(is_hole)
    if hole_order is not None:
        assert np.array_equal(np.sort(hole_order), holes), "hole_order is no permutation of the holes"
        holes = hole_order.astype(np.int64)
    return np.concatenate([prompt, holes]), len(prompt)


def content_limits(columns_BC: Tensor, prompt_B: Tensor) -> Tensor:
    """Return how many columns each content row sees: itself and all before it; the prompt sees the whole prompt."""
    return torch.maximum(columns_BC + 1, prompt_B.unsqueeze(1))


def visible(limits_BT: Tensor, num_columns: int) -> Tensor:
    """Expand limits to a boolean mask [B, T, num_columns], True where the row sees the column."""
    return torch.arange(num_columns, device=limits_BT.device) < limits_BT.unsqueeze(-1)
