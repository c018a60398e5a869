"""The order in which a canvas is decoded: its prompt, then its holes. Pure: imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE


def decoding_order(
    canvas: NDArray[np.int32], hole_order: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], int]:
    """Return (position at each rank, number of prompt tokens): prompt positions first, then the holes from left to right.

    This is the binary-lattice rule: one order for each pattern of holes, so that the density is unique. `hole_order`
    replaces the order of the holes; it must be a permutation of them. Source: Guo and Ermon, "Reviving any-subset autoregressive
    models" (ASSD), on orders.
    """
    is_hole = canvas == HOLE
    prompt, holes = np.flatnonzero(~is_hole), np.flatnonzero(is_hole)
    if hole_order is not None:
        assert np.array_equal(np.sort(hole_order), holes), "hole_order is not a permutation of the holes"
        holes = hole_order.astype(np.int64)
    return np.concatenate([prompt, holes]), len(prompt)
