"""Reads rows of the inputs and measures their canvases, for the planner: in its own process, or in tasks on a cluster.

    pieces of the inputs --batches--> batches of rows --sizes--> tables of SURVEYED, in the same order

Rows that can't be read or tokenized are included, with the kind of their error. Knows no spec and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.actors.job import RowRecipe
from draftmill.actors.planning.beginnings import BEGINNING, beginnings
from draftmill.actors.rows.canvas import CanvasSize
from draftmill.actors.rows.makers import Maker
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.unit_io import make_row
from draftmill.storage.errors import RowError
from draftmill.storage.inputs.kept import KeptTypes, names_read
from draftmill.storage.inputs.reader import column_types, fetch_ahead, iterate
from draftmill.storage.inputs.rows import WHOLE, FileSlice, InputFile, Row
from draftmill.storage.runs.unit_table import ROW_SCHEMA
from draftmill.storage.stores.parallel import parallel_map

CONSTRAINED = pa.field("constrained", pa.bool_(), nullable=False)
"""Whether one of the row's holes has a constraint."""

SURVEYED: pa.Schema = pa.schema([*ROW_SCHEMA, BEGINNING, CONSTRAINED])

HASH = pa.field("hash", pa.binary(16), nullable=False)
"""A column that tasks add to SURVEYED: hashes of the ids, by which the planner finds one that occurs twice."""

BATCH_ROWS = 1024
BATCH_CHARS = 4 * 2**20
"""A batch is measured when it reaches one of these limits; the second bounds memory when rows are long."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or a slice of it; `number` is the file's number in the plan."""

    number: int
    file: InputFile
    part: FileSlice = WHOLE


@dataclass(slots=True)
class Batch:
    """Rows of one file that will be measured together; `chars` is their approximate size."""

    piece: FilePart
    rows: list[Row] = field(default_factory=list)
    chars: int = 0


def survey_pieces(
    recipe: RowRecipe,
    maker: Maker,
    pieces: Sequence[FilePart],
    kept: KeptTypes | None,
    *,
    limit: int | None = None,
    threads: int = 0,
) -> Iterator[pa.Table]:
    """Yield tables of SURVEYED in the order of the pieces, at most `limit` rows in total.

    `kept` collects the types of the columns that are copied into the results. With `threads`, batches are measured in threads,
    and `kept` may be ahead of the tables. Raises UserError if a whole file is missing or damaged.
    """

    def measure(batch: Batch) -> pa.Table:
        return _measure_batch(recipe, maker, batch)

    pending = batches(recipe, pieces, kept, limit)
    if not threads:
        yield from map(measure, pending)
        return
    for _, table in parallel_map(pending, measure, threads=threads, ahead=2 * threads):
        yield table.result()


def batches(
    recipe: RowRecipe, pieces: Sequence[FilePart], kept: KeptTypes | None, limit: int | None = None
) -> Iterator[Batch]:
    """Yield the rows of the pieces in batches of one piece each, at most `limit` rows in total."""
    left = limit
    places = ((piece.file, [(piece.part.row, piece.part.offset)]) for piece in pieces)
    for piece, (file, _) in zip(pieces, fetch_ahead(places), strict=True):
        batch = Batch(piece)
        columns = read_columns(recipe)
        types = column_types(file, kept.names) if kept is not None else None
        if kept is not None and types is not None:
            kept.see_types(types)
        elif kept is not None:
            columns |= names_read(kept.names)
        for row in iterate(file, columns=columns, chunk_chars=recipe.chunk_chars, part=piece.part):
            if left == 0:
                break
            left = None if left is None else left - 1
            if kept is not None and types is None:
                kept.see(row.values or {})
            batch.rows.append(row)
            batch.chars += _chars(row.values or {})
            if len(batch.rows) == BATCH_ROWS or batch.chars >= BATCH_CHARS:
                yield batch
                batch = Batch(piece)
        if batch.rows:
            yield batch
        if left == 0:
            return


def _chars(value: Any) -> int:
    """A value's approximate size: the characters of its texts, and one for each number of a list."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    if not isinstance(value, list):
        return 1
    return sum(map(_chars, value)) if value and isinstance(value[0], str | dict | list) else len(value)


def _measure_batch(recipe: RowRecipe, maker: Maker, batch: Batch) -> pa.Table:
    rows, file = batch.rows, batch.piece.file
    names, _, sizes = zip(*(make_row(recipe, file, row, maker.size) for row in rows), strict=True)

    def column(get: Callable[[CanvasSize], int]) -> pa.Array:
        return pa.array([get(size) if isinstance(size, CanvasSize) else 0 for size in sizes], pa.int32())

    columns = {
        "file": pa.array(np.full(len(rows), batch.piece.number, dtype=np.int32)),
        "row": pa.array([row.row for row in rows], pa.int64()),
        "offset": pa.array([row.offset for row in rows], pa.int64()),
        "id": pa.array(names, pa.string()),
        "length": column(lambda size: size.length),
        "holes": column(lambda size: size.masked),
        "error_kind": pa.array([error.kind if isinstance(error, RowError) else None for error in sizes], pa.string()),
        "sample": pa.array(np.zeros(len(rows), dtype=np.int32)),
        CONSTRAINED.name: pa.array(
            [isinstance(size, CanvasSize) and size.is_constrained for size in sizes], pa.bool_()
        ),
        BEGINNING.name: beginnings([size.beginning if isinstance(size, CanvasSize) else None for size in sizes]),
    }
    return pa.Table.from_arrays([columns[name] for name in SURVEYED.names], schema=SURVEYED)
