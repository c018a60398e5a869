"""Reads every input row once and measures its canvas; the planner packs this stream of rows into units.

The stream includes rows that can't be read or tokenized, with the kind of their error; they become failed rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from actors.canvas import Size
from actors.clerk import guarded
from actors.makers import Maker
from actors.plan_table import ROW_SCHEMA
from actors.rows import Values, row_id, row_key
from jobs.spec.job_spec import JobSpec
from storage.errors import RowError
from storage.inputs.kept import KeptTypes, names_read
from storage.inputs.reader import InputFile, Row, column_types, default_id, fetched_ahead, iterate
from storage.stores.promises import side_by_side

BATCH_ROWS = 1024
BATCH_CHARS = 4 * 2**20
"""A batch is measured when it reaches one of these limits; the second bounds memory when rows are long."""

MOST_THREADS = 16
"""Tokenizing releases the interpreter's lock. Reading and counting rows hold it, so more threads would be idle."""


@dataclass(slots=True)
class Batch:
    """Rows of one file that will be measured together; `chars` is their approximate size."""

    file: int
    rows: list[Row] = field(default_factory=list)
    chars: int = 0


def survey(
    spec: JobSpec, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None = None
) -> Iterator[pa.Table]:
    """Yield tables of ROW_SCHEMA in input order, at most `input.limit` rows in total.

    `kept` collects the types of the columns that are copied into the results.

    Raises UserError if a whole file is missing or damaged.
    """
    threads = min(MOST_THREADS, os.cpu_count() or 1)

    def measured(batch: Batch) -> pa.Table:
        return _measured(spec, maker, inputs[batch.file], batch)

    for _, table in side_by_side(_batches(spec, inputs, kept), measured, threads=threads, ahead=2 * threads):
        yield table.result()


def _batches(spec: JobSpec, inputs: Sequence[InputFile], kept: KeptTypes | None) -> Iterator[Batch]:
    left, s3 = spec.input.limit, spec.s3.options()
    for number, (file, _) in enumerate(fetched_ahead(((file, [(0, 0)]) for file in inputs), s3=s3)):
        batch = Batch(number)
        columns = spec.input.columns.wanted(spec.task)
        types = column_types(file, spec.kept, s3) if kept is not None else None
        if kept is not None and types is not None:
            kept.see_types(types)
        elif kept is not None:
            columns |= names_read(spec.kept)
        for row in iterate(file, columns=columns, chunk_chars=spec.input.chunk_chars, s3=s3):
            if left == 0:
                break
            left = None if left is None else left - 1
            if kept is not None and types is None:
                kept.see(row.values or {})
            batch.rows.append(row)
            batch.chars += _chars(row.values or {})
            if len(batch.rows) == BATCH_ROWS or batch.chars >= BATCH_CHARS:
                yield batch
                batch = Batch(number)
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


def _measured(spec: JobSpec, maker: Maker, file: InputFile, batch: Batch) -> pa.Table:
    named = [_named(spec, file, row) for row in batch.rows]
    good = [(row.values or {}, key) for row, (_, key) in zip(batch.rows, named, strict=True) if isinstance(key, int)]
    sizes = iter(_sizes(maker, good))
    found = [next(sizes) if isinstance(key, int) else key for _, key in named]
    return table_of(
        batch.file,
        rows=[row.row for row in batch.rows],
        offsets=[row.offset for row in batch.rows],
        ids=[name for name, _ in named],
        found=found,
    )


def _sizes(maker: Maker, rows: Sequence[tuple[Values, int]]) -> Sequence[Size | RowError]:
    """The sizes of the rows' canvases; if the batch can't be measured as a whole, measures each row separately."""
    found = guarded(lambda: maker.sizes(rows), "tokenize", "tokenize_error")
    if not isinstance(found, RowError):
        return found
    return [guarded(partial(_size, maker, *row), "tokenize", "tokenize_error") for row in rows]


def _size(maker: Maker, values: Values, key: int) -> Size:
    return maker.make(values, key).size


def _named(spec: JobSpec, file: InputFile, row: Row) -> tuple[str, int | RowError]:
    """The row's id, and its key or its error."""
    name = default_id(file, row.row).encode("utf-8", "backslashreplace").decode()
    if row.error is not None:
        return name, row.error
    values = row.values or {}
    try:
        name = row_id(values, spec.input.columns) or name
        return name, row_key(values, spec.input.columns, job_seed=spec.seed, sample_id=name)
    except RowError as error:
        return name, error


def table_of(
    file: int,
    *,
    rows: Sequence[int],
    offsets: Sequence[int | None],
    ids: Sequence[str],
    found: Sequence[Size | RowError],
) -> pa.Table:
    """Return a table of ROW_SCHEMA for rows of one file."""

    def sizes(get: Callable[[Size], int]) -> pa.Array:
        return pa.array([get(size) if isinstance(size, Size) else 0 for size in found], pa.int32())

    columns = {
        "file": pa.array(np.full(len(rows), file, dtype=np.int32)),
        "row": pa.array(rows, pa.int64()),
        "offset": pa.array(offsets, pa.int64()),
        "id": pa.array(ids, pa.string()),
        "length": sizes(lambda size: size.length),
        "holes": sizes(lambda size: size.masked),
        "error_kind": pa.array([error.kind if isinstance(error, RowError) else None for error in found], pa.string()),
        "sample": pa.array(np.zeros(len(rows), dtype=np.int32)),
    }
    return pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)


def each_sample(table: pa.Table, count: int) -> pa.Table:
    """Repeat each row of a table of ROW_SCHEMA once for every sample (`sampling.n`); the samples of a row stay together."""
    if count == 1:
        return table
    repeated = table.take(pa.array(np.repeat(np.arange(table.num_rows), count)))
    numbers = pa.array(np.tile(np.arange(count, dtype=np.int32), table.num_rows))
    return repeated.set_column(ROW_SCHEMA.get_field_index("sample"), ROW_SCHEMA.field("sample"), numbers)
