"""Reads row groups of Parquet files, one batch in memory at a time, for groups of any size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill.storage.arrow_validation import THREADS, sound
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.fields import outer_columns
from draftmill.storage.inputs.rows import InputFile, Slice, damaged
from draftmill.storage.inputs.sources import open_bytes
from draftmill.storage.stores.interface import S3Options

BATCH_BYTES = 8 * 2**20
BATCH_ROWS = 4096
SHARED_BYTES = 64 * 2**20
"""The most bytes of a batch if all of its rows share the longest text in the dictionaries."""

DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Exceptions on reading a damaged container; the last one for a column name that is not UTF-8."""

Columns = tuple[str, ...] | None
"""The file's columns to read, None for all; missing ones are skipped."""


def num_groups(file: InputFile, s3: S3Options | None) -> int:
    """Number of the file's row groups."""
    return int(_opened(file, s3).num_row_groups)


def group_slices(file: InputFile, slice_bytes: int, s3: S3Options | None) -> Iterator[Slice]:
    """Cut a Parquet file into slices of whole row groups, each of about `slice_bytes` uncompressed; at least one slice.

    Raises UserError if the file is damaged.
    """
    first, row, start, size = 0, 0, 0, 0
    metadata = _opened(file, s3).metadata
    for group in range(metadata.num_row_groups - 1):
        row += metadata.row_group(group).num_rows
        size += metadata.row_group(group).total_byte_size
        if size >= slice_bytes:
            yield Slice(start, groups=(first, group + 1))
            first, start, size = group + 1, row, 0
    yield Slice(start, groups=(first, metadata.num_row_groups))


def group_schema(file: InputFile, s3: S3Options | None) -> pa.Schema:
    """The file's columns and their types."""
    return _opened(file, s3).schema_arrow


def groups_of(file: InputFile, rows: Sequence[int], s3: S3Options | None) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (group, its first row, the wanted rows in it) for sorted rows; those beyond the end are skipped."""
    starts = _starts(file, s3)
    inside = [row for row in rows if row < starts[-1]]
    for group, numbers in groupby(inside, key=lambda row: bisect_right(starts, row) - 1):
        yield group, starts[group], list(numbers)


def group_batches(file: InputFile, group: int, columns: Columns, s3: S3Options | None) -> Iterator[pa.RecordBatch]:
    """Yield a row group's batches; ArrowInvalid if its row count differs from the footer's."""
    opened = _opened(file, s3)
    about = opened.metadata.row_group(group)
    names = _leaves(opened, columns)
    rows = min(BATCH_ROWS, BATCH_BYTES * about.num_rows // max(1, about.total_byte_size))
    if min(rows, about.num_rows) * about.total_byte_size > SHARED_BYTES:
        rows = min(rows, SHARED_BYTES // max(1, _longest_shared(file, group, columns, s3)))
    found = 0
    for batch in opened.iter_batches(batch_size=max(1, rows), row_groups=[group], columns=names, use_threads=THREADS):
        found += batch.num_rows
        yield batch
    if found != about.num_rows:  # a damaged page may end a column early without an error
        raise pa.ArrowInvalid(f"{found} rows, but the footer says {about.num_rows}")


def _leaves(opened: pq.ParquetFile, columns: Columns) -> list[str] | None:
    """The columns to read from the file; of a struct only the wanted field."""
    names = opened.schema_arrow.names
    if columns is None or not any("." in column for column in columns):
        return present(names, columns)
    paths = [f"{opened.schema.column(index).path}." for index in range(len(opened.schema))]
    inner = {
        column for column in columns if column not in names and any(path.startswith(f"{column}.") for path in paths)
    }
    return [*outer_columns(names, [column for column in columns if column not in inner]), *sorted(inner)]


def present(names: list[str], columns: Columns) -> list[str] | None:
    """The names that are these columns or contain them; None for all."""
    return None if columns is None else outer_columns(names, columns)


@lru_cache(maxsize=64)
def _starts(file: InputFile, s3: S3Options | None) -> list[int]:
    """The first row of each row group, and the number of rows at the end."""
    opened, starts = _opened(file, s3), [0]
    for group in range(opened.num_row_groups):
        starts.append(starts[-1] + opened.metadata.row_group(group).num_rows)
    return starts


def _longest_shared(file: InputFile, group: int, columns: Columns, s3: S3Options | None) -> int:
    """Bytes of the longest texts in the dictionaries of a row group, one of each column added up; of its first row at least.

    A chunk's dictionary precedes its values, and is read whole for the first value.
    """
    texts = [field.name for field in _opened(file, s3).schema_arrow if is_bytes(field.type)]
    found = present(texts, columns)
    names = texts if found is None else found
    if not names:
        return 0
    coded = _coded(file, tuple(names), s3)
    batch = next(coded.iter_batches(batch_size=1, row_groups=[group], columns=names, use_threads=THREADS), None)
    if batch is None:
        return 0
    return sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in sound(batch).columns)


@lru_cache(maxsize=64)
def _opened(file: InputFile, s3: S3Options | None) -> pq.ParquetFile:
    """An open file with its footer read. pre_buffer would hold whole row groups in memory, so it is off."""
    try:
        return pq.ParquetFile(open_bytes(file, s3=s3), pre_buffer=False, buffer_size=2**20)
    except DAMAGE as error:
        raise UserError(str(damaged(file, 0, error))) from None


@lru_cache(maxsize=4)
def _coded(file: InputFile, names: tuple[str, ...], s3: S3Options | None) -> pq.ParquetFile:
    """The same with texts as dictionaries. Only for inspection: while reading, a dictionary grows to that of its whole group."""
    metadata = _opened(file, s3).metadata
    source = open_bytes(file, s3=s3)
    return pq.ParquetFile(source, metadata=metadata, read_dictionary=list(names), pre_buffer=False, buffer_size=2**20)


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of the type are runs of bytes whose lengths are known without reading them."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
