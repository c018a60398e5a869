"""Readers of columnar inputs: Parquet, Arrow (file and stream) and Hugging Face datasets, one batch at a time.

Row groups of Parquet files may have any size. A value that has no Python form (a time out of range, invalid UTF-8 in a string
column) fails its row alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.huggingface import load
from draftmill.storage.inputs.inputs import is_object, local_path
from draftmill.storage.inputs.kept import lift_batch, outer_columns
from draftmill.storage.inputs.lines import too_long_message
from draftmill.storage.inputs.rows import MAX_ROW_BYTES, WHOLE, FileSlice, InputFile, Row, damage_error, failed_row
from draftmill.storage.inputs.sources import check_same, open_bytes
from draftmill.storage.parquet import THREADS, sound
from draftmill.storage.stores.local import translate_errors

BATCH_BYTES = 8 * 2**20
BATCH_ROWS = 4096
SHARED_BYTES = 64 * 2**20
"""The most bytes of a batch if all of its rows share the longest text in the dictionaries."""

DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Exceptions on reading a damaged container; the last one for a column name that is not UTF-8."""

Columns = tuple[str, ...] | None
"""The file's columns to read, None for all; missing ones are skipped."""


def group_slices(file: InputFile, slice_bytes: int) -> Iterator[FileSlice]:
    """Cut a Parquet file into slices of whole row groups, each of about `slice_bytes` uncompressed; at least one slice.

    Raises UserError if the file is damaged.
    """
    first, row, start, size = 0, 0, 0, 0
    metadata = _open_parquet(file).metadata
    for group in range(metadata.num_row_groups - 1):
        row += metadata.row_group(group).num_rows
        size += metadata.row_group(group).total_byte_size
        if size >= slice_bytes:
            yield FileSlice(start, groups=(first, group + 1))
            first, start, size = group + 1, row, 0
    yield FileSlice(start, groups=(first, metadata.num_row_groups))


def _groups_of(file: InputFile, rows: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (group, its first row, the wanted rows in it) for sorted rows; those beyond the end are skipped."""
    starts = _starts(file)
    inside = [row for row in rows if row < starts[-1]]
    for group, numbers in groupby(inside, key=lambda row: bisect_right(starts, row) - 1):
        yield group, starts[group], list(numbers)


def group_batches(file: InputFile, group: int, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Yield a row group's batches; ArrowInvalid if its row count differs from the footer's."""
    parquet = _open_parquet(file)
    about = parquet.metadata.row_group(group)
    names = _leaves(parquet, columns)
    rows = min(BATCH_ROWS, BATCH_BYTES * about.num_rows // max(1, about.total_byte_size))
    if min(rows, about.num_rows) * about.total_byte_size > SHARED_BYTES:
        rows = min(rows, SHARED_BYTES // max(1, _longest_shared(file, group, columns)))
    num_rows = 0
    for batch in parquet.iter_batches(batch_size=max(1, rows), row_groups=[group], columns=names, use_threads=THREADS):
        num_rows += batch.num_rows
        yield batch
    if num_rows != about.num_rows:  # a damaged page may end a column early without an error
        raise pa.ArrowInvalid(f"{num_rows} rows, but the footer says {about.num_rows}")


def _leaves(parquet: pq.ParquetFile, columns: Columns) -> list[str] | None:
    """The columns to read from the file; of a struct only the wanted field."""
    names = parquet.schema_arrow.names
    if columns is None:
        return None
    paths = [f"{parquet.schema.column(index).path}." for index in range(len(parquet.schema))]
    inner = {
        column for column in columns if column not in names and any(path.startswith(f"{column}.") for path in paths)
    }
    return [*outer_columns(names, [column for column in columns if column not in inner]), *sorted(inner)]


@lru_cache(maxsize=64)
def _starts(file: InputFile) -> list[int]:
    """The first row of each row group, and the number of rows at the end."""
    metadata = _open_parquet(file).metadata
    return [0, *accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))]


def _longest_shared(file: InputFile, group: int, columns: Columns) -> int:
    """Bytes of the longest texts in the dictionaries of a row group, one of each column added up; of its first row at least.

    A chunk's dictionary precedes its values, and is read whole for the first value.
    """
    texts = [field.name for field in _open_parquet(file).schema_arrow if _is_bytes(field.type)]
    names = texts if columns is None else outer_columns(texts, columns)
    if not names:
        return 0
    coded = _open_coded(file, tuple(names))
    batch = next(coded.iter_batches(batch_size=1, row_groups=[group], columns=names, use_threads=THREADS), None)
    if batch is None:
        return 0
    return sum(pc.max(pc.binary_length(column.dictionary)).as_py() or 0 for column in sound(batch).columns)


@lru_cache(maxsize=64)
def _open_parquet(file: InputFile) -> pq.ParquetFile:
    """An open file with its footer read. pre_buffer would hold whole row groups in memory, so it is off."""
    try:
        return pq.ParquetFile(open_bytes(file), pre_buffer=False, buffer_size=2**20)
    except DAMAGE as error:
        raise UserError(str(damage_error(file, 0, error))) from None


@lru_cache(maxsize=4)
def _open_coded(file: InputFile, names: tuple[str, ...]) -> pq.ParquetFile:
    """The same with texts as dictionaries. Only for inspection: while reading, a dictionary grows to that of its whole group."""
    metadata = _open_parquet(file).metadata
    source = open_bytes(file)
    return pq.ParquetFile(source, metadata=metadata, read_dictionary=list(names), pre_buffer=False, buffer_size=2**20)


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether values of the type are runs of bytes whose lengths are known without reading them."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


KEPT_BYTES = 256 * 2**20
"""Cached batches: more than the texts of most windows (jobs/plan/packing.py, WINDOW_TOKENS)."""

PORTION_BYTES = MAX_ROW_BYTES
"""At most the size limit of a row: a longer row is then a separate portion."""

Batches = Iterator[pa.RecordBatch]
_NO_PYTHON_FORM = (ValueError, OverflowError, TypeError, NotImplementedError, pa.ArrowException)


@dataclass(slots=True)
class _ReadTable:
    """A table that is read from its front: its last batches, each with its first row, and the iterator of the next ones."""

    ahead: Batches
    kept: deque[tuple[int, pa.RecordBatch]] = field(default_factory=deque)
    end: int = 0
    num_bytes: int = 0

    @property
    def start(self) -> int:
        """The first row that is still cached."""
        return self.kept[0][0] if self.kept else self.end

    def advance(self) -> bool:
        """Read one more batch; False at the end."""
        batch = next(self.ahead, None)
        if batch is None:
            return False
        self.kept.append((self.end, batch))
        self.end += batch.num_rows
        self.num_bytes += batch.nbytes
        return True

    def drop(self) -> int:
        """Drop the oldest batch; returns its bytes."""
        _, batch = self.kept.popleft()
        self.num_bytes -= batch.nbytes
        return int(batch.nbytes)


class BatchCache:
    """The most recently read batches, `kept_bytes` in all and at least one, so that neighbouring rows are read once.

    The rows of a unit lie anywhere in their window, and the next unit has other rows of the same window: a reader that starts at
    the front of a row group for each unit would read a large group hundreds of times.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._tables: OrderedDict[Hashable, _ReadTable] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(table.num_bytes for table in self._tables.values())

    def pick(
        self, name: Hashable, rows: Sequence[int], open_: Callable[[], Batches]
    ) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
        """Yield the wanted rows (sorted) with their numbers, batch by batch; rows beyond the end are skipped.

        `open_` gives the table's batches from its front. Its exceptions propagate, and the table is read again next time.
        """
        if not rows:
            return
        table = self._tables.pop(name, None)
        if table is None or rows[0] < table.start:
            table = _ReadTable(open_())
        for start, batch in list(table.kept):
            yield from _inside(batch, start, rows)
        while rows[-1] >= table.end and table.advance():
            yield from _inside(table.kept[-1][1], table.kept[-1][0], rows)
            self._make_room(table)
        self._tables[name] = table

    def _make_room(self, current: _ReadTable) -> None:
        """Drop the least recently used tables, then the front of the one that is being read."""
        total = current.num_bytes + self.num_bytes
        while total > self._kept_bytes and self._tables:
            total -= self._tables.popitem(last=False)[1].num_bytes
        while total > self._kept_bytes and len(current.kept) > 1:
            total -= current.drop()


def _inside(batch: pa.RecordBatch, start: int, rows: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
    inside = rows[bisect_left(rows, start) : bisect_left(rows, start + batch.num_rows)]
    if inside:
        yield batch.take(pa.array([row - start for row in inside])), inside


_ARROW_FILE = b"ARROW1"
_BATCHES = BatchCache()


def table_rows(file: InputFile, columns: Columns, part: FileSlice = WHOLE) -> Iterator[Row]:
    """Yield every row of a slice; UserError if the file is damaged, after the rows before the damage."""
    row = part.row
    try:
        for batch in map(sound, _batches(file, columns, part.groups)):
            yield from _rows_of(batch, range(row, row + batch.num_rows), columns)
            row += batch.num_rows
    except DAMAGE as error:
        raise damage_error(file, row, error) from None


def pick_table_rows(file: InputFile, rows: Sequence[int], columns: Columns) -> Iterator[Row]:
    """Yield the rows of these numbers (sorted, unique); numbers beyond the end are skipped."""
    try:
        if file.format == "parquet":
            for group, first, inside in _groups_of(file, rows):
                batches = partial(group_batches, file, group, columns)
                yield from _pick((file, group, columns), first, inside, columns, batches)
        elif file.format == "hf":
            dataset = load(file)
            if inside := [row for row in rows if row < len(dataset)]:
                yield from _rows_of(_project(dataset[inside], columns), inside, columns)
        else:
            yield from _pick((file, columns), 0, rows, columns, partial(_batches, file, columns))
    except DAMAGE as error:
        raise damage_error(file, rows[0], error) from None


def table_schema(file: InputFile) -> pa.Schema:
    """The schema of a file; UserError if it is damaged."""
    try:
        if file.format == "parquet":
            return _open_parquet(file).schema_arrow
        if file.format == "hf":
            return load(file).features.arrow_schema
        with _arrow_source(file) as source:
            return _open_arrow(source).schema
    except DAMAGE as error:
        raise damage_error(file, 0, error) from None


def _batches(file: InputFile, columns: Columns, groups: tuple[int, int] | None = None) -> Iterator[pa.RecordBatch]:
    if file.format == "parquet":
        for group in range(*(groups or (0, _open_parquet(file).num_row_groups))):
            yield from group_batches(file, group, columns)
    elif file.format == "hf":
        dataset = load(file)
        for first in range(0, len(dataset), BATCH_ROWS):
            yield from _project(dataset[first : first + BATCH_ROWS], columns).to_batches()
    else:
        yield from _arrow_batches(file, columns)


def _arrow_batches(file: InputFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    with _arrow_source(file) as source:
        reader = _open_arrow(source)
        is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            selected = batch if columns is None else batch.select(outer_columns(batch.schema.names, columns))
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield selected.slice(first, BATCH_ROWS)
        if not is_file and source.tell() != source.size():
            # Zeros, and a second stream after the first, look like the end of the stream.
            raise pa.ArrowInvalid(f"{source.size() - source.tell()} bytes after the end of the stream")


def _open_arrow(source: Any) -> Any:
    """A reader of an Arrow file, or of a stream."""
    is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    open_ = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return open_(source, options=pa.ipc.IpcReadOptions(use_threads=THREADS))


def _arrow_source(file: InputFile) -> Any:
    # Skipping batches is free with mapped memory.
    if not is_object(file) and file.size:
        path = local_path(file)
        with translate_errors(path):
            check_same(file, path.stat())
            return pa.memory_map(str(path))
    return pa.PythonFile(open_bytes(file), mode="r")


def _pick(
    table: Hashable, first: int, rows: Sequence[int], columns: Columns, open_: Callable[[], Batches]
) -> Iterator[Row]:
    for batch, inside in _BATCHES.pick(table, [row - first for row in rows], lambda: map(sound, open_())):
        yield from _rows_of(batch, [first + row for row in inside], columns)


def _rows_of(table: pa.RecordBatch | pa.Table, numbers: Sequence[int], columns: Columns) -> Iterator[Row]:
    """The rows of a batch or table, in portions that fit into memory."""
    first = 0
    for read in table.to_batches() if isinstance(table, pa.Table) else (table,):
        batch = read if columns is None else lift_batch(read, columns)
        sizes = _row_bytes(batch)
        for start, stop in _portions(sizes):
            if sizes[start] > MAX_ROW_BYTES:  # then it is alone in its portion
                yield failed_row(numbers[first + start], None, "bad_row", too_long_message("row"))
            else:
                yield from _portion_rows(batch.slice(start, stop - start), numbers[first + start : first + stop])
        first += batch.num_rows


def _row_bytes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Bytes of the texts and byte strings of each row, shared ones counted in full; int64 [rows]. Nested ones are not counted."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _is_bytes(column.type.value_type):
            # A dictionary may hold a null, and an index may be null.
            lengths = pc.fill_null(pc.binary_length(column.dictionary), 0)
            sizes += pc.fill_null(lengths.take(column.indices), 0).to_numpy(zero_copy_only=False)
        elif _is_bytes(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return sizes


def _portions(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut rows of these sizes into [start, stop) portions of at most PORTION_BYTES, or of one row.

    A columnar file may store a text once that many rows share: a few kilobytes can stand for terabytes.
    """
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + PORTION_BYTES, side="right")))
        yield start, stop
        start = stop


def _portion_rows(batch: pa.RecordBatch, numbers: Sequence[int]) -> Iterator[Row]:
    """The rows of a batch, one by one if the whole batch has no Python form."""
    try:
        values = batch.to_pylist()
    except _NO_PYTHON_FORM as error:
        if batch.num_rows > 1:
            for index, number in enumerate(numbers):
                yield from _portion_rows(batch.slice(index, 1), [number])
        elif isinstance(error, UnicodeError):
            yield failed_row(numbers[0], None, "bad_encoding", f"not valid UTF-8: {error}")
        else:
            yield failed_row(numbers[0], None, "bad_row", f"a value has no Python form: {error}")
        return
    talks = _conversations(batch.schema)
    for number, value in zip(numbers, values, strict=True):
        yield Row(number, None, value | {name: _without_nulls(value[name]) for name in talks})


def _conversations(schema: pa.Schema) -> list[str]:
    kinds = {field.name: field.type for field in schema if hasattr(field.type, "value_type")}
    return [
        name
        for name, kind in kinds.items()
        if pa.types.is_struct(kind.value_type) and kind.value_type.get_field_index("role") >= 0
    ]


def _without_nulls(value: Any) -> Any:
    """Arrow has every key of one message, or of one tool call, in all of them: what is null there is absent here."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _project(table: pa.Table, columns: Columns) -> pa.Table:
    return table if columns is None else table.select(outer_columns(table.column_names, columns))
