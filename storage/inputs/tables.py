"""Readers of columnar inputs: Parquet, Arrow (file and stream) and Hugging Face datasets, one batch at a time.

A value that has no Python form (a time out of range, invalid UTF-8 in a string column) fails its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from draftmill.storage.arrow_validation import THREADS, sound
from draftmill.storage.inputs.fields import lifted_batch
from draftmill.storage.inputs.input_file import InputFile
from draftmill.storage.inputs.inputs import local_path
from draftmill.storage.inputs.last_read import Batches, Stretches
from draftmill.storage.inputs.lines import too_long_message
from draftmill.storage.inputs.portions import portions, row_bytes
from draftmill.storage.inputs.row_groups import (
    BATCH_ROWS,
    DAMAGE,
    Columns,
    group_batches,
    group_schema,
    groups_of,
    num_groups,
    present,
)
from draftmill.storage.inputs.rows import MAX_ROW_BYTES, Row, damaged, failed
from draftmill.storage.inputs.slices import WHOLE, Slice
from draftmill.storage.inputs.sources import check_same, open_bytes
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.local import translated

_ARROW_FILE = b"ARROW1"
_STRETCHES = Stretches()


def table_rows(file: InputFile, columns: Columns, s3: S3Options | None, part: Slice = WHOLE) -> Iterator[Row]:
    """Yield every row of a slice; UserError if the file is damaged, after the rows before the damage."""
    row = part.row
    try:
        for batch in map(sound, _batches(file, columns, s3, part.groups)):
            yield from _rows_of(batch, range(row, row + batch.num_rows), columns)
            row += batch.num_rows
    except DAMAGE as error:
        raise damaged(file, row, error) from None


def pick_table_rows(file: InputFile, rows: Sequence[int], columns: Columns, s3: S3Options | None) -> Iterator[Row]:
    """Yield the rows of these numbers (sorted, unique); numbers beyond the end are skipped."""
    try:
        if file.format == "parquet":
            for group, first, inside in groups_of(file, rows, s3):
                opened = partial(group_batches, file, group, columns, s3)
                yield from _picked((file, group, columns, s3), first, inside, columns, opened)
        elif file.format == "hf":
            yield from _pick_dataset(file, rows, columns)
        else:
            yield from _picked((file, columns, s3), 0, rows, columns, partial(_batches, file, columns, s3))
    except DAMAGE as error:
        raise damaged(file, rows[0], error) from None


def table_schema(file: InputFile, s3: S3Options | None) -> pa.Schema:
    """The schema of a file; UserError if it is damaged."""
    try:
        if file.format == "parquet":
            return group_schema(file, s3)
        if file.format == "hf":
            from draftmill.storage.inputs.huggingface import load

            return load(file).features.arrow_schema
        with _arrow_source(file, s3) as source:
            is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
            source.seek(0)
            return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).schema
    except DAMAGE as error:
        raise damaged(file, 0, error) from None


def _batches(
    file: InputFile, columns: Columns, s3: S3Options | None, groups: tuple[int, int] | None = None
) -> Iterator[pa.RecordBatch]:
    if file.format == "parquet":
        for group in range(*(groups or (0, num_groups(file, s3)))):
            yield from group_batches(file, group, columns, s3)
    elif file.format == "hf":
        from draftmill.storage.inputs.huggingface import load

        dataset = load(file)
        for first in range(0, len(dataset), BATCH_ROWS):
            yield from _projected(dataset[first : first + BATCH_ROWS], columns).to_batches()
    else:
        yield from _arrow_batches(file, columns, s3)


def _arrow_batches(file: InputFile, columns: Columns, s3: S3Options | None) -> Iterator[pa.RecordBatch]:
    with _arrow_source(file, s3) as source:
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        options = pa.ipc.IpcReadOptions(use_threads=THREADS)
        if is_file:
            opened = pa.ipc.open_file(source, options=options)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(source, options=options))
        for batch in batches:
            wanted = batch if columns is None else batch.select(present(batch.schema.names, columns))
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield wanted.slice(first, BATCH_ROWS)
        if not is_file and source.tell() != source.size():
            # Zeros, and a second stream after the first, look like the end of the stream.
            raise pa.ArrowInvalid(f"{source.size() - source.tell()} bytes after the end of the stream")


def _arrow_source(file: InputFile, s3: S3Options | None) -> Any:
    # Skipping batches is free with mapped memory.
    if not file.uri.startswith("s3://") and file.size:
        path = local_path(file)
        with translated(path):
            check_same(file, path.stat())
            return pa.memory_map(str(path))
    return pa.PythonFile(open_bytes(file, s3=s3), mode="r")


def _picked(
    table: Hashable, first: int, rows: Sequence[int], columns: Columns, opened: Callable[[], Batches]
) -> Iterator[Row]:
    """The wanted rows of a table whose first row is `first`."""
    for batch, inside in _STRETCHES.pick(table, [row - first for row in rows], lambda: map(sound, opened())):
        yield from _rows_of(batch, [first + row for row in inside], columns)


def _rows_of(table: pa.RecordBatch | pa.Table, numbers: Sequence[int], columns: Columns) -> Iterator[Row]:
    """The rows of a batch or table, in portions that fit into memory."""
    first = 0
    for read in table.to_batches() if isinstance(table, pa.Table) else (table,):
        batch = read if columns is None else lifted_batch(read, columns)
        sizes = row_bytes(batch)
        for start, stop in portions(sizes):
            if sizes[start] > MAX_ROW_BYTES:  # then it is alone in its portion
                yield failed(numbers[first + start], None, "bad_row", too_long_message("row"))
            else:
                yield from _portion_rows(batch.slice(start, stop - start), numbers[first + start : first + stop])
        first += batch.num_rows


def _portion_rows(batch: pa.RecordBatch, numbers: Sequence[int]) -> Iterator[Row]:
    """The rows of a batch, one by one if the whole batch has no Python form."""
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError, TypeError, NotImplementedError, pa.ArrowException):
        yield from (_single_row(batch.slice(index, 1), number) for index, number in enumerate(numbers))
        return
    for number, value in zip(numbers, values, strict=True):
        yield Row(number, None, value)


def _single_row(batch: pa.RecordBatch, number: int) -> Row:
    try:
        return Row(number, None, batch.to_pylist()[0])
    except UnicodeError as error:
        return failed(number, None, "bad_encoding", f"not valid UTF-8: {error}")
    except (ValueError, OverflowError, TypeError, NotImplementedError, pa.ArrowException) as error:
        return failed(number, None, "bad_row", f"a value has no Python form: {error}")


def _pick_dataset(file: InputFile, rows: Sequence[int], columns: Columns) -> Iterator[Row]:
    from draftmill.storage.inputs.huggingface import load

    dataset = load(file)
    inside = [row for row in rows if row < len(dataset)]
    if inside:
        yield from _rows_of(_projected(dataset[inside], columns), inside, columns)


def _projected(table: pa.Table, columns: Columns) -> pa.Table:
    return table if columns is None else table.select(present(table.column_names, columns))
