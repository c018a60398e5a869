"""Fills a forward over canvases up to the sizes of a captured one (graphs.py), with rows, positions and masks that mean nothing.

    rows         one more span takes the rows that are missing; they write the column that no canvas has, and see nothing
    positions    one more stretch takes those that are missing; they stand where no canvas has a token, so none is a mask
    masks        those beyond the true ones are copies of the first, and sorted behind all stretches

Legend: P spans, A asked stretches, F fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from draftmill.decoders.engine import look_packing as told
from draftmill.decoders.engine.look_packing import Packed
from draftmill.decoders.engine.looks import COLUMN, COUNT, MORE, POSITION
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Parcel

_NO_DRAFT = -1


def filled(packed: Packed, size: Callable[[int], int | None], trash: tuple[int, int]) -> Packed | None:
    """The forward with more rows; None if it is too large. `trash` is (position, column), of slot 0."""
    parcel, wanted = packed.parcel, {}
    counts = {
        "spans": 1,
        "asked": 1,
        "news": 1,
        "drafts": 1,
        "slots": 0,
        "times": 0,
        "steps": 0,
        "masks": 0,
        "picks": 0,
        "own": 1,
    }
    # A span and a stretch more than there are.
    more = {"spans": 1, "asked": 1, "steps": 1, "masks": 1}
    for name, axis in counts.items():
        if parcel.has(name):
            wanted[name] = axis, size(parcel.length(name, axis) + more.get(name, 0))
    rows, positions, masks = (size(count) for count in (packed.num_rows, packed.num_positions, packed.num_masks))
    if rows is None or positions is None or masks is None:
        return None
    sizes = {name: (axis, count) for name, (axis, count) in wanted.items() if count is not None}
    if len(sizes) < len(wanted):
        return None
    position = trash[0]
    nowhere = np.array([[0], [position], [0]]), np.array([[0], [position], [0], [0]])
    spans = _spans(parcel, sizes["spans"][1], rows - packed.num_rows, packed.num_rows, trash)
    asked = _stretches(parcel, sizes["asked"][1], positions - packed.num_positions, packed.num_positions, position)
    fills: dict[str, Ints | int] = {"spans": spans, "asked": asked, "news": nowhere[0], "drafts": nowhere[1], "own": 1}
    return replace(
        packed,
        parcel=parcel.filled(sizes, fills),
        num_slots=sizes["slots"][1],
        num_rows=rows,
        num_positions=positions,
        num_masks=masks,
        trash=trash,
    )


def _spans(parcel: Parcel, size: int, missing: int, before: int, trash: tuple[int, int]) -> Ints:
    """One span of all missing rows, and others of none."""
    num_fields, count = parcel.length("spans", 0), parcel.length("spans", 1)
    span_FP: Ints = np.zeros((num_fields, size - count), dtype=np.int64)
    span_FP[POSITION], span_FP[COLUMN] = trash
    span_FP[MORE], span_FP[told.BEFORE] = _NO_DRAFT, before
    span_FP[COUNT, 0] = missing
    return span_FP


def _stretches(parcel: Parcel, size: int, missing: int, before: int, position: int) -> Ints:
    """One stretch of all missing positions, and others of none."""
    num_fields, count = parcel.length("asked", 0), parcel.length("asked", 1)
    asked_FA: Ints = np.zeros((num_fields, size - count), dtype=np.int64)
    asked_FA[told.FIRST], asked_FA[told.EARLIER], asked_FA[told.OF_MORE] = position, before, _NO_DRAFT
    asked_FA[-1, 0] = missing
    return asked_FA
