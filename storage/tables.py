"""Readers of columnar inputs: Parquet, Arrow (file and stream) and Hugging Face datasets, one batch in memory at a time.

A value that has no Python form (a time out of range, bytes that are no UTF-8 in a string column) fails its row alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import UserError
from storage.input_file import InputFile
from storage.inputs import local_path
from storage.lines import too_long_message
from storage.portions import is_bytes, portions, row_bytes
from storage.rows import MAX_ROW_BYTES, Row, damaged, failed
from storage.soundness import THREADS, check_sound
from storage.sources import open_bytes
from storage.verbs import S3Options

BATCH_BYTES = 8 * 2**20
BATCH_ROWS = 4096
CACHED_GROUP_BYTES = 64 * 2**20
SHARED_BYTES = 256 * 2**20
_ARROW_FILE = b"ARROW1"
_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What reading a damaged container raises; the last for the name of a column that is no UTF-8."""

Columns = tuple[str, ...] | None
"""The file's columns to read, None for all; those that it lacks are passed over."""


def table_rows(file: InputFile, columns: Columns, s3: S3Options | None) -> Iterator[Row]:
    """Yield every row; UserError if the file is damaged, after the rows in front of the damage."""
    row = 0
    try:
        for batch in _batches(file, columns, s3):
            check_sound(batch)
            yield from _rows_of(batch, range(row, row + batch.num_rows))
            row += batch.num_rows
    except _DAMAGE as error:
        raise damaged(file, row, error) from None


def pick_table_rows(file: InputFile, rows: Sequence[int], columns: Columns, s3: S3Options | None) -> Iterator[Row]:
    """Yield the rows of these numbers (sorted, each once); numbers beyond the end are passed over."""
    try:
        if file.format == "parquet":
            yield from _pick_parquet(file, rows, columns, s3)
        elif file.format == "hf":
            yield from _pick_dataset(file, rows, columns)
        else:
            yield from _pick_batches(_batches(file, columns, s3), 0, rows)
    except _DAMAGE as error:
        raise damaged(file, rows[0], error) from None


def _batches(file: InputFile, columns: Columns, s3: S3Options | None) -> Iterator[pa.RecordBatch]:
    if file.format == "parquet":
        opened = _parquet(file, s3)
        groups = list(range(opened.num_row_groups))
        yield from _group_batches(opened, groups, columns)
    elif file.format == "hf":
        from storage.huggingface import load

        dataset = load(file)
        for first in range(0, len(dataset), BATCH_ROWS):
            yield from _projected(dataset[first : first + BATCH_ROWS], columns).to_batches()
    else:
        yield from _arrow_batches(file, columns, s3)


def _group_batches(opened: pq.ParquetFile, groups: list[int], columns: Columns) -> Iterator[pa.RecordBatch]:
    if not groups:
        return
    metadata = opened.metadata
    num_bytes = sum(metadata.row_group(group).total_byte_size for group in groups)
    num_rows = sum(metadata.row_group(group).num_rows for group in groups)
    size = max(1, min(BATCH_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))
    names = _present(opened.schema_arrow.names, columns)
    found = 0
    for batch in opened.iter_batches(batch_size=size, row_groups=groups, columns=names, use_threads=THREADS):
        found += batch.num_rows
        yield batch
    if found != num_rows:  # a damaged page may end a column early, without a word
        raise pa.ArrowInvalid(f"{found} rows, where the footer says {num_rows}")


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
            wanted = batch if columns is None else batch.select(_present(batch.schema.names, columns))
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield wanted.slice(first, BATCH_ROWS)
        if not is_file and source.tell() != source.size():
            # Zeros, and a second stream behind the first, look like the end of the stream.
            raise pa.ArrowInvalid(f"{source.size() - source.tell()} bytes behind the end of the stream")


def _arrow_source(file: InputFile, s3: S3Options | None) -> Any:
    # Mapped memory makes passing over batches free.
    if not file.uri.startswith("s3://") and file.size:
        return pa.memory_map(str(local_path(file)))
    return pa.PythonFile(open_bytes(file, s3=s3), mode="r")


def _rows_of(table: pa.RecordBatch | pa.Table, numbers: Sequence[int]) -> Iterator[Row]:
    """The rows of a batch or table, as many at a time as memory holds."""
    first = 0
    for batch in table.to_batches() if isinstance(table, pa.Table) else (table,):
        sizes = row_bytes(batch)
        for start, stop in portions(sizes):
            if sizes[start] > MAX_ROW_BYTES:  # then it is alone
                yield failed(numbers[first + start], None, "bad_row", too_long_message("row"))
            else:
                yield from _portion_rows(batch.slice(start, stop - start), numbers[first + start : first + stop])
        first += batch.num_rows


def _portion_rows(batch: pa.RecordBatch, numbers: Sequence[int]) -> Iterator[Row]:
    """The rows of a batch, one by one where the batch as a whole has no Python form."""
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


def _pick_batches(batches: Iterator[pa.RecordBatch], first: int, rows: Sequence[int]) -> Iterator[Row]:
    """Yield the wanted rows of batches that begin at row `first`, reading no further than the last."""
    wanted = list(rows)
    for batch in batches:
        inside = wanted[: bisect_right(wanted, first + batch.num_rows - 1)]
        if inside:
            check_sound(batch)
            yield from _rows_of(batch.take(pa.array([row - first for row in inside])), inside)
            wanted = wanted[len(inside) :]
        first += batch.num_rows
        if not wanted:
            return


def _pick_parquet(file: InputFile, rows: Sequence[int], columns: Columns, s3: S3Options | None) -> Iterator[Row]:
    opened = _parquet(file, s3)
    starts = _group_starts(opened)
    inside = [row for row in rows if row < starts[-1]]
    for group, numbers in groupby(inside, key=lambda row: bisect_right(starts, row) - 1):
        wanted = list(numbers)
        table = _row_group(file, s3, group, columns)
        if table is not None:
            yield from _rows_of(table.take(pa.array([row - starts[group] for row in wanted])), wanted)
        else:
            yield from _pick_batches(_group_batches(opened, [group], columns), starts[group], wanted)


def _group_starts(opened: pq.ParquetFile) -> list[int]:
    """The first row of each row group, and the number of rows at the end."""
    starts = [0]
    for group in range(opened.num_row_groups):
        starts.append(starts[-1] + opened.metadata.row_group(group).num_rows)
    return starts


def _pick_dataset(file: InputFile, rows: Sequence[int], columns: Columns) -> Iterator[Row]:
    from storage.huggingface import load

    dataset = load(file)
    inside = [row for row in rows if row < len(dataset)]
    if inside:
        yield from _rows_of(_projected(dataset[inside], columns), inside)


def _projected(table: pa.Table, columns: Columns) -> pa.Table:
    return table if columns is None else table.select(_present(table.column_names, columns))


def _present(names: list[str], columns: Columns) -> list[str] | None:
    return None if columns is None else [name for name in names if name in columns]


@lru_cache(maxsize=8)
def _parquet(file: InputFile, s3: S3Options | None) -> pq.ParquetFile:
    """An open file with its footer read. pre_buffer would hold whole row groups in memory, so it is off."""
    try:
        opened = pq.ParquetFile(open_bytes(file, s3=s3), pre_buffer=False, buffer_size=2**20)
        shared = _shared_texts(opened)
        if not shared:
            return opened
        return pq.ParquetFile(open_bytes(file, s3=s3), read_dictionary=shared, pre_buffer=False, buffer_size=2**20)
    except _DAMAGE as error:
        raise UserError(str(damaged(file, 0, error))) from None


@lru_cache(maxsize=2)
def _row_group(file: InputFile, s3: S3Options | None, group: int, columns: Columns) -> pa.Table | None:
    """A row group that is small enough to keep, else None. The footer's size is of the coded values; repeated texts
    may unpack to far more."""
    opened = _parquet(file, s3)
    if opened.metadata.row_group(group).total_byte_size > CACHED_GROUP_BYTES:
        return None
    kept, num_bytes = [], 0
    for batch in _group_batches(opened, [group], columns):
        kept.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > CACHED_GROUP_BYTES:
            return None
    return pa.Table.from_batches(kept).unify_dictionaries()


def _shared_texts(opened: pq.ParquetFile) -> list[str]:
    """The columns whose rows may share texts so large that a batch of copies would not fit in memory: all texts, where it may be.

    What the footer says of single columns would tell more, but with a damaged one merely asking ends the process.
    """
    metadata = opened.metadata
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if all(min(BATCH_ROWS, group.num_rows) * group.total_byte_size <= SHARED_BYTES for group in groups):
        return []
    return [field.name for field in opened.schema_arrow if is_bytes(field.type)]
