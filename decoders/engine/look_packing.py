"""Packs what all samples of a forward ask about their canvases: one buffer for the device, and what the host must know of it.

Numpy over spans, stretches and drafts only: nothing here is as long as a canvas.

Legend: B samples, P spans, A asked stretches, L slots of the cache, F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.looks import (
    ASKED_FIELDS,
    BEST,
    COLUMN,
    COUNT,
    HI,
    LEAD,
    LO,
    LO1,
    MASKS,
    MORE,
    NODE,
    POSITION,
    SIDE,
    SPAN,
    SPAN_FIELDS,
    Look,
)
from draftmill.decoders.engine.packing import Ints, repeated
from draftmill.decoders.engine.parcels import Parcel

# What the device is told of a span, after its fields: the slot of its canvas, which of the forward's cache slots it writes, the
# rows before it in that slot, and the rows before it in all.
SLOT, OWNER, LINE, BEFORE = range(SPAN_FIELDS, SPAN_FIELDS + 4)
# What it is told of a stretch: the row that predicts position 0, the first position, the positions before
# this stretch, the node's drafts, the slot, and the sample's key.
ROW, FIRST, EARLIER, OF_LEAD, OF_MORE, OF_SLOT, KEY = range(7)
_SIGHTS: Final = range(LO1, SPAN_FIELDS)


@dataclass(frozen=True, slots=True)
class Packed:
    """A forward's buffer, and its shape on the host.

    `top_B` is the position below which the masks of each sample are asked about, `slot_R` the slot of each mask that is read,
    `size_B` how many picks a sample gets for each step: its own and `ahead` more. Columns are those of the cache; its slots
    `slot_L` have up to `num_lines` rows. `width` is the length of the longest canvas. `num_masks` are read; where rows, positions
    and masks were filled up to the sizes of a captured forward (look_filling.py), `trash` is the position and the column of those
    that mean nothing.
    """

    parcel: Parcel
    num_slots: int
    num_lines: int
    num_rows: int
    num_columns: int
    num_sights: int
    num_positions: int
    num_masks: int
    num_nodes: int
    width: int
    slot_L: Ints
    top_B: Ints
    slot_R: Ints
    size_B: Ints
    ahead: int
    trash: tuple[int, int] | None = None


def pack(
    samples: Sequence[Canvas],
    slot_B: Ints,
    *,
    cached: bool,
    by_node: bool,
    shift: int,
    conditioned: bool,
    fresh: bool = False,
) -> Packed:
    """Pack the asks of these samples. With `cached` the nodes of a sample share its slot; else each span has one of its own.

    `by_node`: a slot is named once for each node, whose rows see the same columns. A row predicts the position `shift` after its
    own. `conditioned`: the model must know the time of each canvas. `fresh`: each step draws anew.
    """
    asks = [sample.ask for sample in samples]
    looks = [ask for ask in asks if isinstance(ask, Look)]
    assert len(looks) == len(asks), "samples of masked diffusion look at their canvases"
    width = max(sample.length for sample in samples)
    each_B = np.arange(len(looks))
    span_PF, spans_B = _table([look.spans for look in looks], SPAN_FIELDS)
    asked_AF, asked_B = _table([look.asked for look in looks], ASKED_FIELDS)
    _put_beside(span_PF, width)
    owner_P, owner_A = np.repeat(each_B, spans_B), np.repeat(each_B, asked_B)
    asked_AF[:, SPAN] += (spans_B.cumsum() - spans_B)[owner_A]
    count_P, parcel = span_PF[:, COUNT], Parcel()
    # The rows of a slot follow each other.
    owned_P = np.arange(len(span_PF))
    if cached:
        owned_P = _numbered(owner_P, span_PF[:, NODE]) if by_node else owner_P
    sample_L = owner_P[np.unique(owned_P, return_index=True)[1]]
    slot_L = slot_B[sample_L] if cached else owned_P
    rows_L = np.bincount(owned_P, weights=count_P, minlength=len(slot_L)).astype(np.int64)
    before_P = count_P.cumsum() - count_P
    line_P = before_P - (rows_L.cumsum() - rows_L)[owned_P]
    parcel.add("spans", np.vstack([span_PF.T, slot_B[owner_P], owned_P, line_P, before_P]))
    parcel.add("slots", slot_L)
    if conditioned:
        parcel.add("times", np.array([look.times for look in looks], dtype=np.float64)[sample_L])
    masks_A, best_A = asked_AF[:, MASKS], asked_AF[:, BEST]
    parcel.add("asked", _stretches(samples, asked_AF, span_PF, before_P, owner_A, shift))
    parcel.add("steps", _steps(looks, owner_A, span_PF[asked_AF[:, SPAN]], conditioned=conditioned, fresh=fresh))
    parcel.add("masks", masks_A)
    parcel.add("picks", _picks(masks_A, best_A))
    _add_tokens(parcel, samples, looks, slot_B)
    first_B = asked_B.cumsum() - asked_B
    ends_PF = span_PF[:, LO1 + 1 :: 2]
    return Packed(
        parcel=parcel,
        num_slots=len(slot_L),
        num_lines=int(rows_L.max()),
        num_rows=int(count_P.sum()),
        num_columns=int(ends_PF.max()),
        num_sights=int(ends_PF.any(0).sum()),
        num_positions=int((asked_AF[:, HI] - asked_AF[:, LO]).sum()),
        num_masks=int(masks_A.sum()),
        num_nodes=int(spans_B.sum()) if not cached else sum(1 + max(look.spans[3::SPAN_FIELDS]) for look in looks),
        width=width,
        slot_L=slot_L,
        top_B=np.maximum.reduceat(asked_AF[:, HI], first_B),
        slot_R=np.repeat(slot_B[owner_A], masks_A),
        size_B=np.add.reduceat(best_A, first_B),
        ahead=max(look.ahead for look in looks),
    )


def _steps(
    looks: Sequence[Look], owner_A: Ints, span_AF: Ints, *, conditioned: bool, fresh: bool
) -> NDArray[np.float64]:
    """The times and the number of the draws of each stretch, [A, 3]; the stretches have the spans `span_AF`."""
    if not (conditioned or fresh):
        return np.zeros((len(owner_A), 3))
    step_A3 = np.array([(*look.times, look.draw) for look in looks], dtype=np.float64)[owner_A]
    step_A3[:, 2] += span_AF[:, LEAD] + (span_AF[:, MORE] >= 0)
    return step_A3


def _add_tokens(parcel: Parcel, samples: Sequence[Canvas], looks: Sequence[Look], slot_B: Ints) -> None:
    """The tokens that each sample has revealed since its last forward, which it then has no longer to tell, and its drafts."""
    news, news_B = _table([sample.news for sample in samples], 2)
    for sample in samples:
        sample.news = []
    parcel.add("news", np.vstack([np.repeat(slot_B, news_B), news.T]))
    drafts, drafts_B = _table([look.drafts for look in looks], 2)
    number_E = repeated(drafts_B.cumsum() - drafts_B, drafts_B)
    parcel.add("drafts", np.vstack([np.repeat(slot_B, drafts_B), drafts.T, number_E]))


def _table(lists: Sequence[Sequence[int]], num_fields: int) -> tuple[Ints, Ints]:
    """All lists, one after the other, as rows of so many fields; and how many rows each list had."""
    flat = [number for numbers in lists for number in numbers]
    sizes = np.array([len(numbers) for numbers in lists], dtype=np.int64)
    return np.array(flat, dtype=np.int64).reshape(-1, num_fields), sizes // num_fields


def _numbered(owner_P: Ints, node_P: Ints) -> Ints:
    """The number of each span's node among all nodes of all samples, [P]; the spans of a node follow each other."""
    is_next = (np.diff(owner_P, prepend=owner_P[0]) != 0) | (np.diff(node_P, prepend=node_P[0]) != 0)
    number_P: Ints = is_next.cumsum()
    return number_P


def _put_beside(span_PF: Ints, width: int) -> None:
    """Give the columns beside the canvases their numbers: from the length of the longest canvas on."""
    for field in (COLUMN, *_SIGHTS):
        span_PF[:, field] -= (span_PF[:, field] >= SIDE) * (SIDE - width)


def _stretches(
    samples: Sequence[Canvas],
    asked_AF: Ints,
    span_PF: Ints,
    before_P: Ints,
    owner_A: Ints,
    shift: int,
) -> Ints:
    """What the device is told of the stretches, [F, A]."""
    span_A, size_A = asked_AF[:, SPAN], asked_AF[:, HI] - asked_AF[:, LO]
    begin_A = span_PF[span_A, POSITION]
    end_A = begin_A + span_PF[span_A, COUNT]
    is_run = (np.maximum(asked_AF[:, LO] - shift, 0) >= begin_A) & (asked_AF[:, HI] - shift <= end_A)
    assert is_run.all(), "a mask is read from a row that was not run"
    slot_B = np.array([sample.slot for sample in samples], dtype=np.int64)
    keys_B2 = np.array([split_key(sample.key) for sample in samples], dtype=np.int64)
    fields = [before_P[span_A] - begin_A, asked_AF[:, LO], size_A.cumsum() - size_A]
    fields += [span_PF[span_A, LEAD], span_PF[span_A, MORE], slot_B[owner_A], *keys_B2[owner_A].T]
    return np.vstack([*fields, size_A])


def _picks(masks_A: Ints, best_A: Ints) -> Ints:
    """Where the best so many of each stretch are among all masks once these are sorted, [P]."""
    assert (best_A <= masks_A).all(), "more picks than masks"
    first_A = masks_A.cumsum() - masks_A
    return np.repeat(first_A, best_A) + repeated(best_A.cumsum() - best_A, best_A)


def copied(samples: Sequence[Canvas], width: int) -> Ints:
    """The columns that the samples want copied after a forward, [3, N]: slot, column, new column.

    `width` is the length of the longest canvas of that forward. The samples want nothing more then.
    """
    copies, counts = _table([sample.copies for sample in samples], 3)
    slot = np.repeat(np.array([sample.slot for sample in samples], dtype=np.int64), counts)
    for sample in samples:
        sample.copies = ()
    source, target, count = copies.T
    step = repeated(count.cumsum() - count, count)
    source = source - (source >= SIDE) * (SIDE - width)
    return np.vstack([np.repeat(slot, count), np.repeat(source, count) + step, np.repeat(target, count) + step])
