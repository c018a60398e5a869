"""The csv reader: records under a header line, each with its byte offset, and recovery after a broken record."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.input_file import FIELD
from draftmill.storage.inputs.lines import BOM, Reader, Start, known_bytes, skip_line, too_long_message
from draftmill.storage.inputs.rows import MAX_ROW_BYTES, Row, failed


@dataclass(frozen=True, slots=True)
class _Record:
    """A record's fields, or the reason why it cannot be read."""

    row: int
    offset: int
    fields: list[str]
    problem: str | None = None


def csv_reader(delimiter: str) -> Reader:
    """Return a reader, for one file, of delimited records under a header line.

    All values are strings; blank lines are skipped.

    Only the record itself fails if its quotes don't end: reading continues at the next line.
    """

    header: list[str] | None = None  # cached, since a unit may start the reader once per row

    def rows(stream: BufferedReader, start: Start) -> Iterator[Row]:
        nonlocal header
        source = _Lines(stream, start.offset)
        if start.offset == 0:
            header = _header(source, delimiter)
        elif header is None:
            stream.seek(0)
            header = _header(_Lines(stream, 0), delimiter)
            stream.seek(start.offset)
        for record in _records(source, delimiter, start.row):
            yield _row(record, header)

    return rows


def header_of(stream: BufferedReader, delimiter: str) -> list[str]:
    """Read the column names at the start of a stream; UserError if they can't be used."""
    return _header(_Lines(stream, 0), delimiter)


def other_delimiter(header: list[str]) -> str | None:
    """A likely delimiter inside the name of a header's only column; None if there is none."""
    if len(header) != 1:
        return None
    return next((character for character in (";", "\t", "|", ",") if character in header[0]), None)


def _header(source: _Lines, delimiter: str) -> list[str]:
    """Read the column names from the start; `source` is then after them."""
    record = next(_records(source, delimiter, 0), None)
    if record is None:
        return []
    problem = record.problem
    if any(map(_has_surrogates, record.fields)):
        problem = f"not valid UTF-8{known_bytes(record.fields[0].encode('utf-8', 'surrogateescape'))}"
    if len(set(record.fields)) < len(record.fields):
        problem = f"a column is named twice: {', '.join(record.fields)}"
    if problem:
        raise UserError(f"the header of a csv file can't be used: {problem}", field=FIELD)
    return record.fields


def _row(record: _Record, header: list[str]) -> Row:
    if record.problem is not None:
        return failed(record.row, record.offset, "bad_row", record.problem)
    if len(record.fields) != len(header):
        reason = f"{len(record.fields)} fields under a header of {len(header)}"
        return failed(record.row, record.offset, "bad_row", reason)
    if any(map(_has_surrogates, record.fields)):
        return failed(record.row, record.offset, "bad_encoding", "not valid UTF-8")
    return Row(record.row, record.offset, dict(zip(header, record.fields, strict=True)))


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _records(source: _Lines, delimiter: str, row: int) -> Iterator[_Record]:
    """Yield every record from the position of `source` on."""
    csv.field_size_limit(2**31 - 1)  # _Lines bounds a record; the module's own 128 kB would fail honest rows
    while first := source.next_line():
        if not first.strip(b"\r\n"):
            continue
        offset = source.offset - len(first)
        used: list[bytes] = []
        try:
            fields = next(csv.reader(_decoded(source, first, used), delimiter=delimiter, strict=True))
            yield _Record(row, offset, fields)
        except (csv.Error, StopIteration) as error:
            source.push_back(used)
            yield _Record(row, offset, [], f"not a csv record: {str(error) or 'the quotes do not end'}")
        row += 1


def _decoded(source: _Lines, first: bytes, used: list[bytes]) -> Iterator[str]:
    """The record's lines as text; those after the first are also kept in `used`, for another try."""
    size, line = 0, first
    while line:
        size += len(line)
        if size > MAX_ROW_BYTES:
            raise csv.Error(too_long_message("record"))
        yield line.decode("utf-8", "surrogateescape")
        line = source.next_line()
        if line:
            used.append(line)


class _Lines:
    """Lines with their ends, and the offset after the last one; lines may be pushed back."""

    def __init__(self, stream: BufferedReader, offset: int) -> None:
        self.offset = offset
        self._stream = stream
        self._again: deque[bytes] = deque()

    def next_line(self) -> bytes:
        """The next line, b"" at the end; a line above MAX_ROW_BYTES is cut, but long enough to be rejected."""
        if self._again:
            line = self._again.popleft()
            self.offset += len(line)
            return line
        line = self._stream.readline(MAX_ROW_BYTES + 1)
        if self.offset == 0 and line.startswith(BOM):
            self.offset, line = len(BOM), line[len(BOM) :]
        self.offset += len(line)
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            self.offset += skip_line(self._stream)
        return line

    def push_back(self, lines: list[bytes]) -> None:
        """The next lines will be these again."""
        self._again.extendleft(reversed(lines))
        self.offset -= sum(map(len, lines))
