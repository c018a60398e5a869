"""Reads rows of inputs, all in order or the few that a unit needs; the public interface of all readers.

A bad row is a Row with an error; an exception means that a whole input is missing, damaged or unreadable.

Large files of lines can be cut by byte ranges, and Parquet files by row groups (tables.py), into slices that are read
independently. The rows of a file's slices, one slice after another, are the rows of the file, with the same numbers and offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BufferedReader
from itertools import islice, takewhile
from pathlib import PurePosixPath
from threading import Lock

import pyarrow as pa

from draftmill.storage.errors import UserError
from draftmill.storage.inputs import lines
from draftmill.storage.inputs.inputs import STDLIB, STDLIB_CHUNK_CHARS, TABLE_FORMATS
from draftmill.storage.inputs.kept import lift, types_in
from draftmill.storage.inputs.rows import FIELD, WHOLE, FileSlice, InputFile, Row, failed_row
from draftmill.storage.inputs.sources import (
    SEEK_BUFFER_BYTES,
    DecompressionCache,
    Stamp,
    blocks_at,
    open_bytes,
    open_stream,
    stamp_of,
)
from draftmill.storage.inputs.tables import Columns, pick_table_rows, table_rows, table_schema
from draftmill.storage.stores.block_cache import BLOCK_BYTES, Block, ahead
from draftmill.storage.stores.store import about

Places = Sequence[tuple[int, int | None]]
"""Rows of a file: number, and offset where there is one."""

_caches = Lock()
"""Protects the open files that read_rows caches, since each has one position."""

_UNPACKED = DecompressionCache()


def iterate(
    file: InputFile,
    *,
    columns: Mapping[str, str] | None = None,
    chunk_chars: int | None = None,
    part: FileSlice = WHOLE,
) -> Iterator[Row]:
    """Yield every row of the file, or of a slice of it, in order, one at a time: memory does not grow with the file.

    `columns` (task column -> file column, or `a.b` for a field of one) lets columnar files leave the others unread; values keep
    the file's own names. `chunk_chars` cuts text files (txt too) into rows of at most that many characters. Raises UserError if
    the file is missing or damaged as a whole, StoreError if the place can't be read now.
    """
    with about(FIELD):
        if file.format in TABLE_FORMATS:
            yield from table_rows(file, _projection(columns), part)
        else:
            with open_stream(file) as stream:
                if part.is_first:
                    _refuse_json_array(file, stream)
                else:
                    stream.seek(part.offset)
                rows = _reader(file, chunk_chars)(stream, part.row, part.offset)
                if (end := part.end) is not None:
                    rows = takewhile(lambda row: row.offset is not None and row.offset < end, rows)
                yield from _with_fields(rows, columns)


def read_rows(
    file: InputFile, rows: Places, *, columns: Mapping[str, str] | None = None, chunk_chars: int | None = None
) -> Iterator[Row]:
    """Yield exactly the requested rows, in the requested order, each as `iterate` yielded it.

    `rows` holds (row, offset) of earlier Rows; with offsets only the bytes needed are read. A row that is not there
    any more is a Row with an error. Open files, row groups and blocks are cached between calls, within fixed bounds.
    Raises UserError if the file is missing or damaged as a whole, StoreError if the place can't be read now.
    """
    places = sorted(set(rows), key=lambda place: place[0])
    with about(FIELD), _caches:
        if file.format in TABLE_FORMATS:
            read = pick_table_rows(file, [row for row, _ in places], _projection(columns))
        else:
            read = _with_fields(_pick_stream_rows(file, places, _reader(file, chunk_chars)), columns)
        by_number = {row.row: row for row in read}
    for number, offset in rows:
        yield by_number.get(number) or failed_row(
            number, offset, "bad_row", f"row {number} is not in {file.uri} any more"
        )


def fetch_ahead(files: Iterable[tuple[InputFile, Places]]) -> Iterator[tuple[InputFile, Places]]:
    """Yield files with places in them, in order, while the data of the next ones is fetched from its bucket.

    Small files are fetched whole, large ones only around the offsets; large tables and compressed files are not fetched ahead,
    since the position of a row in them is unknown.
    """

    def blocks(item: tuple[InputFile, Places]) -> Iterable[Block]:
        file, places = item
        if file.size is not None and file.size <= BLOCK_BYTES:
            return blocks_at(file, [0])
        if file.format in TABLE_FORMATS or file.compression is not None:
            return []
        return blocks_at(file, [offset for _, offset in places if offset is not None])

    return ahead(files, blocks)


def has_lines(file: InputFile, chunk_chars: int | None) -> bool:
    """Whether each row of the file is a line, found by line ends alone, in a file of known size that is not compressed."""
    is_lines = file.format == "jsonl" or (file.format == "txt" and chunk_chars is None)
    return is_lines and file.compression is None and file.size is not None


def count_lines(file: InputFile, start: int, stop: int) -> tuple[int, int]:
    """Return the offset of the first line that begins in the bytes [start, stop), and how many lines begin there.

    The offset is `stop` if none does. `stop` is at most the size of the file. Raises StoreError if the file can't be read.
    """
    first, count = (0, 1) if start == 0 else (stop, 0)
    at = max(0, start - 1)  # a line begins after each line end, so that the last byte of the range has no say
    with open_bytes(file) as stream:
        stream.seek(at)
        while at < stop - 1 and (data := stream.read(min(2**20, stop - 1 - at))):
            if not count and (end := data.find(b"\n")) >= 0:
                first = at + end + 1
            count += data.count(b"\n")
            at += len(data)
    return first, count


def _with_fields(rows: Iterator[Row], columns: Mapping[str, str] | None) -> Iterator[Row]:
    """The rows, with wanted nested fields added as separate columns (storage/inputs/kept.py)."""
    inner = [name for name in (columns or {}).values() if "." in name]
    for row in rows:
        if inner and row.values is not None:
            row.values = lift(row.values, inner)
        yield row


def _projection(columns: Mapping[str, str] | None) -> Columns:
    return None if columns is None else tuple(sorted(set(columns.values())))


def _refuse_json_array(file: InputFile, stream: BufferedReader) -> None:
    if ".json" in PurePosixPath(file.name.lower()).suffixes and stream.peek(1).lstrip(lines.BOM).lstrip()[:1] == b"[":
        raise UserError(f"{file.uri} holds a JSON array; give one object a line (jq -c '.[]')", field=FIELD)


def _reader(file: InputFile, chunk_chars: int | None) -> lines.Reader:
    if chunk_chars is None and file.uri.startswith(f"{STDLIB}/"):
        chunk_chars = STDLIB_CHUNK_CHARS
    if file.format in {"txt", "text"} and chunk_chars is not None:
        return lines.piece_reader(chunk_chars)
    if file.format == "csv":
        return lines.csv_reader(file.name, _delimiter_of(file))
    return {"jsonl": lines.jsonl_rows, "txt": lines.txt_rows, "text": lines.whole_rows}[file.format]


def column_types(file: InputFile, columns: Iterable[str]) -> dict[str, pa.DataType] | None:
    """The types of these columns in a columnar file; None for other files, whose rows have types of their own."""
    if file.format not in TABLE_FORMATS:
        return None
    with about(FIELD):
        return types_in(table_schema(file), columns)


def _delimiter_of(file: InputFile) -> str:
    return file.delimiter or ("\t" if ".tsv" in file.name.lower() else ",")


def delimiter_hint(files: Iterable[InputFile]) -> str:
    """A hint about the first csv file whose header seems to have another delimiter; empty if there is none."""
    for file in files:
        if file.format == "csv":
            with open_stream(file) as stream:
                other = lines.likely_delimiter(stream, file.name, _delimiter_of(file))
            if other is not None:
                named = "tab" if other == "\t" else other
                return f"; the header of {file.name} looks delimited by {other!r}: set input.delimiter to '{named}'"
            break
    return ""


def _pick_stream_rows(file: InputFile, places: Places, reader: lines.Reader) -> Iterator[Row]:
    """Seek to each row if all have offsets, else read from the front to the last of them."""
    if any(offset is None for _, offset in places):
        numbers = {row for row, _ in places}
        with open_stream(file) as front:
            rows = (row for row in reader(front, 0, 0) if row.row in numbers)
            yield from islice(rows, len(numbers))
        return
    stream = _UNPACKED.open(file) if file.compression is not None else _seekable(file, stamp_of(file))
    for row, offset in places:
        assert offset is not None
        stream.seek(offset)
        yield from islice(reader(stream, row, offset), 1)


@lru_cache(maxsize=64)
def _seekable(file: InputFile, stamp: Stamp | None) -> BufferedReader:
    """An open file; one that was written to since has another stamp, and is opened and checked again."""
    return open_bytes(file, buffer_bytes=SEEK_BUFFER_BYTES)
