"""Packs what all samples of a forward ask about their canvases: the rows of the forward, and the masks that are read.

Legend: B samples, P spans, G nodes or samples whose rows share the columns that they see, R masks, A stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE
from draftmill.decoders.engine.asks import COLUMN
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.lanes import Packed
from draftmill.decoders.engine.looks import LO1, NODE, NODE_FIELDS, SIDE, Look
from draftmill.decoders.engine.packing import Ints, Table, repeated


@dataclass(frozen=True, slots=True)
class AskedMasks:
    """The masks of a forward, sample after sample, stretch after stretch.

    `slot_R` are the slots of their samples, `draw_R` the numbers of their steps' draws, `time_R2` the times of the canvas and of
    the next step. Stretches have `size_A` masks, the best `best_A` of which are answered, `size_B` in all for each sample, for
    its own step and for `ahead_B` more.
    """

    slot_R: Ints
    position_R: Ints
    draw_R: Ints
    time_R2: NDArray[np.float64]
    size_A: Ints
    best_A: Ints
    size_B: Ints
    ahead_B: Sequence[int]

    @property
    def num_masks(self) -> int:
        """R."""
        return len(self.slot_R)


def pack(
    samples: Sequence[Canvas], slot_B: Ints, *, cached: bool, by_node: bool, conditioned: bool, mask_id: int
) -> tuple[Packed, AskedMasks, int]:
    """The rows of these samples, their masks, and how many nodes run. With `cached` the nodes of a sample share its slot.

    `by_node`: a slot is named once for each node, whose rows see the same columns. `conditioned`: the model must know the time.
    """
    looks = [sample.ask for sample in samples if isinstance(sample.ask, Look)]
    assert len(looks) == len(samples), "samples of masked diffusion look at their canvases"
    width, each_B = max(sample.length for sample in samples), np.arange(len(looks))
    spans = [number for look in looks for number in look.spans]
    owner_P = np.repeat(each_B, [len(look.spans) // NODE_FIELDS for look in looks])
    span_PF: Ints = np.array(spans, dtype=np.int64).reshape(-1, NODE_FIELDS)
    for field in (COLUMN, *range(LO1, NODE_FIELDS)):
        span_PF[:, field] = placed(span_PF[:, field], width)
    is_next_P = (np.diff(owner_P, prepend=-1) != 0) | (np.diff(span_PF[:, NODE], prepend=-1) != 0)
    node_P: Ints = is_next_P.cumsum() - 1
    group_P = node_P if by_node or not cached else owner_P
    owner_G = owner_P[np.unique(group_P, return_index=True)[1]]
    table = Table(span_PF.reshape(-1), group_P, len(owner_G), fields=NODE_FIELDS)
    token_N = np.concatenate([look.tokens for look in looks])
    rows_B, size_B = (
        np.array([len(one) for one in each]) for each in zip(*((x.tokens, x.rows) for x in looks), strict=True)
    )
    row_R, owner_R = np.concatenate([look.rows for look in looks]), np.repeat(each_B, size_B)
    assert ((row_R >= 0) & (row_R < rows_B[owner_R])).all(), "a mask is read from a row that was not run"
    times = np.array([look.times for look in looks], dtype=np.float64)
    packed = Packed(
        # Without a cache nothing is kept: each node has the next slot.
        slot_B=slot_B[owner_G] if cached else np.arange(len(owner_G)),
        tokens=np.where(token_N == HOLE, mask_id, token_N),
        table=table,
        queries=None,
        longest=width,
        places_R=row_R + (rows_B.cumsum() - rows_B)[owner_R],
        time_B=times[owner_G, 0] if conditioned else None,
        num_positions=width if by_node else None,
    )
    best_A = np.array([best for look in looks for best in look.bests], dtype=np.int64)
    masks = AskedMasks(
        slot_R=slot_B[owner_R],
        position_R=np.concatenate([look.positions for look in looks]),
        draw_R=np.concatenate([look.draws for look in looks]),
        time_R2=times[owner_R],
        size_A=np.array([size for look in looks for size in look.sizes], dtype=np.int64),
        best_A=best_A,
        size_B=np.array([sum(look.bests) for look in looks], dtype=np.int64),
        ahead_B=[look.ahead for look in looks],
    )
    return packed, masks, int(node_P[-1]) + 1


def placed(column_P: Ints, width: int) -> Ints:
    """The true columns: those beside the canvases stand behind the longest one."""
    return column_P - (column_P >= SIDE) * (SIDE - width)


def copied(samples: Sequence[Canvas], width: int) -> Ints:
    """The columns that the samples want copied after a forward, [3, N]: slot, column, new column; then they want nothing more.

    `width` is the length of the longest canvas of that forward.
    """
    copies: Ints = np.array([number for sample in samples for number in sample.copies], dtype=np.int64).reshape(-1, 3)
    slot = np.repeat([sample.slot for sample in samples], [len(sample.copies) // 3 for sample in samples])
    for sample in samples:
        sample.copies = ()
    source, target, count = copies.T
    step, source = repeated(count.cumsum() - count, count), placed(source, width)
    return np.vstack([np.repeat(slot, count), np.repeat(source, count) + step, np.repeat(target, count) + step])
