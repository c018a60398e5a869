"""Readers of byte streams: jsonl, csv, txt and whole text files. A bad line becomes a Row with an error.

Each reader can start at any row whose byte offset is known, and then yields the same rows as when started at the front. So a
plan's (row, offset) is enough to read a single row again.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.rows import FIELD, MAX_ROW_BYTES, Row, failed_row

BOM = b"\xef\xbb\xbf"

MAX_LEVELS = 200
"""The most levels of lists and objects in a row's JSON. Python's own bound depends on how deep the calling code stands, so that
planning might refuse a row that a worker reads."""
TOO_DEEP = f"its lists and objects are nested more than {MAX_LEVELS} levels deep"


Reader = Callable[[BufferedReader, int, int], Iterator[Row]]
"""Yields the rows of a stream from row `row` on, which starts at byte `offset`, where the stream is positioned."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One line without its end; `data` is cut, and `too_long` set, beyond MAX_ROW_BYTES."""

    row: int
    offset: int
    data: bytes
    too_long: bool


def _lines(stream: BufferedReader, row: int, offset: int) -> Iterator[_Line]:
    """Yield the lines from here on, at most one of MAX_ROW_BYTES in memory; UTF-8 marks at the front of a line, where files were
    joined, are dropped."""
    while data := stream.readline(MAX_ROW_BYTES + 1):
        size = len(data)
        too_long = size > MAX_ROW_BYTES and not data.endswith(b"\n")
        if too_long:
            size += _skip_line(stream)
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        yield _Line(row, offset, _unmarked(data), too_long)
        row, offset = row + 1, offset + size


def _unmarked(data: bytes) -> bytes:
    while data.startswith(BOM):
        data = data[len(BOM) :]
    return data


def _skip_line(stream: BufferedReader) -> int:
    """Read to the line's end without keeping it; return the number of bytes."""
    size = 0
    while data := stream.readline(2**20):
        size += len(data)
        if data.endswith(b"\n"):
            break
    return size


def jsonl_rows(stream: BufferedReader, row: int, offset: int) -> Iterator[Row]:
    """One row per non-blank line; the line must hold a JSON object."""
    for line in _lines(stream, row, offset):
        if line.data.strip() or line.too_long:
            yield _jsonl_row(line)


def _not_utf8(data: bytes, offset: int) -> str:
    """The message of a row that is not UTF-8: what its file seems to be, by the first bytes, or which byte is not."""
    if data.startswith(b"\x1f\x8b"):
        return "not valid UTF-8, but gzip: give the file a name that ends in .gz"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "not valid UTF-8, but UTF-16: save it as UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        where = f"{data[error.start]:#04x} near byte {offset + error.start:,} of the file"
        return f"not valid UTF-8: {where}; `iconv -f latin1 -t utf-8` converts Latin-1"
    return "not valid UTF-8: it has half of a UTF-16 surrogate pair"


def _jsonl_row(line: _Line) -> Row:
    if line.too_long:
        return failed_row(line.row, line.offset, "bad_row", too_long_message("line"))
    try:
        values = json.loads(line.data.decode("utf-8"))
        _refuse_deep(line.data, values)
        if b"\\u" in line.data:  # half of a UTF-16 pair can't be stored or tokenized: UnicodeEncodeError
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        return failed_row(line.row, line.offset, "bad_encoding", _not_utf8(line.data, line.offset))
    except RecursionError:
        return failed_row(line.row, line.offset, "bad_json", TOO_DEEP)
    except ValueError as error:
        comma = "; JSON lines have no comma at their end" if line.data.rstrip().endswith(b"},") else ""
        return failed_row(line.row, line.offset, "bad_json", f"not valid JSON: {error}{comma}")
    if not isinstance(values, dict):
        return failed_row(line.row, line.offset, "bad_row", f"a JSON object is needed, not {type(values).__name__}")
    return Row(line.row, line.offset, openai_request(values))


def openai_request(values: dict[str, Any]) -> dict[str, Any]:
    """Lift the id, and `prompt` or `messages`, out of an OpenAI batch request.

    Other objects stay as they are. The request's own fields are kept beside the lifted ones. A list of one prompt, which that
    API allows, is the prompt. If the body is not an object, the id is lifted all the same, so that the failure can be looked up
    by id.
    """
    if not is_openai_request(values):
        return values
    body = values["body"] if isinstance(values.get("body"), dict) else {}
    lifted = {key: body[key] for key in ("prompt", "messages") if key in body}
    prompt = lifted.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        lifted["prompt"] = prompt[0]
    return {"id": values["custom_id"]} | values | lifted


def is_openai_request(values: Mapping[str, Any]) -> bool:
    """Whether an object is an OpenAI batch request: it has a `custom_id`, and a `body`, a `url`, or nothing else at all."""
    return "custom_id" in values and (
        "body" in values or "url" in values or values.keys() <= {"custom_id", "id", "method"}
    )


def lacks_custom_id(values: Mapping[str, Any]) -> bool:
    """Whether an object seems to be an OpenAI batch request, but has no `custom_id`."""
    return (
        "custom_id" not in values and isinstance(values.get("body"), dict) and bool({"url", "method"} & values.keys())
    )


def _refuse_deep(data: bytes, values: Any) -> None:
    """Raise RecursionError for values that are nested more than MAX_LEVELS deep."""
    if data.count(b"[") + data.count(b"{") <= MAX_LEVELS:
        return
    level, depth = [values], 0
    while level := [value for value in level if isinstance(value, list | dict)]:
        depth += 1
        if depth > MAX_LEVELS:
            raise RecursionError(TOO_DEEP)
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]


def txt_rows(stream: BufferedReader, row: int, offset: int) -> Iterator[Row]:
    """One row per line, blank ones too, in the column `text`."""
    for line in _lines(stream, row, offset):
        if line.too_long:
            yield failed_row(line.row, line.offset, "bad_row", too_long_message("line"))
        else:
            yield _text_row(line.row, line.offset, line.data.decode("utf-8", "surrogateescape"))


def _text_row(row: int, offset: int, text: str) -> Row:
    """A row of text decoded with surrogateescape: bytes that are not UTF-8 become surrogates, and fail the row."""
    if _has_surrogates(text):
        return failed_row(row, offset, "bad_encoding", _not_utf8(text.encode("utf-8", "surrogateescape"), offset))
    return Row(row, offset, {"text": text})


def whole_rows(stream: BufferedReader, row: int, offset: int) -> Iterator[Row]:
    """The whole file as one row, kept to the byte, in the column `text`."""
    data = stream.read(MAX_ROW_BYTES + 1)
    if len(data) > MAX_ROW_BYTES:
        yield failed_row(0, 0, "bad_row", too_long_message("file"))
    else:
        yield _text_row(0, 0, data.removeprefix(BOM).decode("utf-8", "surrogateescape"))


def piece_reader(chunk_chars: int) -> Reader:
    """Return a reader that cuts a text into rows of at most `chunk_chars` characters.

    It cuts after the last line end that fits, and inside a line only if the line alone is longer. The pieces join
    to the text, except that pieces of only white space are skipped.
    """

    def rows(stream: BufferedReader, row: int, offset: int) -> Iterator[Row]:
        for size, text in _pieces(stream, chunk_chars, at_front=offset == 0):
            if text.strip():
                yield _text_row(row, offset, text)
                row += 1
            offset += size

    return rows


def _pieces(stream: BufferedReader, chunk_chars: int, *, at_front: bool) -> Iterator[tuple[int, str]]:
    """Yield (bytes, text) of each piece. What a piece is depends only on where it starts, so any start will do."""
    # A character has at most four bytes: with this many at hand, one more than a piece is certainly whole.
    need = 4 * chunk_chars + 4
    held = stream.read(need)
    if at_front and held.startswith(BOM):
        yield len(BOM), ""
        held = held[len(BOM) :] + stream.read(len(BOM))
    while held:
        text = held.decode("utf-8", "surrogateescape")
        if len(text) > chunk_chars:
            text = text[: text.rfind("\n", 0, chunk_chars) + 1 or chunk_chars]
        size = len(text.encode("utf-8", "surrogateescape"))
        yield size, text
        held = held[size:] + stream.read(need - len(held) + size)


def too_long_message(what: str) -> str:
    """The message of a row beyond MAX_ROW_BYTES."""
    return f"the {what} is longer than {MAX_ROW_BYTES // 2**20} MiB"


# ---- csv

_Record = tuple[int, int, list[str] | str]
"""A record's row, its byte offset, and its fields or the reason why it can't be read."""


def csv_reader(name: str, delimiter: str) -> Reader:
    """Return a reader, for the file of this name, of delimited records under a header line.

    All values are strings; blank lines are skipped. If a record's quotes don't end, it alone fails: reading continues at the
    next line.
    """

    header: list[str] | None = None  # cached, since a unit may start the reader once per row

    def rows(stream: BufferedReader, row: int, offset: int) -> Iterator[Row]:
        nonlocal header
        source = _Lines(stream, offset)
        if offset == 0:
            header = _read_header(source, name, delimiter)
        elif header is None:
            stream.seek(0)
            header = _read_header(_Lines(stream, 0), name, delimiter)
            stream.seek(offset)
        for number, start, fields in _records(source, delimiter, row):
            if isinstance(fields, str):
                yield failed_row(number, start, "bad_row", fields)
            elif len(fields) != len(header):
                yield failed_row(number, start, "bad_row", f"{len(fields)} fields under a header of {len(header)}")
            elif any(map(_has_surrogates, fields)):
                data = delimiter.join(fields).encode(
                    "utf-8", "surrogateescape"
                )  # without quotes, which the offset lacks
                yield failed_row(number, start, "bad_encoding", _not_utf8(data, start))
            else:
                yield Row(number, start, dict(zip(header, fields, strict=True)))

    return rows


def likely_delimiter(stream: BufferedReader, name: str, delimiter: str) -> str | None:
    """Another delimiter, if the header at the stream's start has one column whose name contains it; else None.

    Raises UserError if the header can't be used.
    """
    header = _read_header(_Lines(stream, 0), name, delimiter)
    return next((other for other in (";", "\t", "|", ",") if other in header[0]), None) if len(header) == 1 else None


def _read_header(source: _Lines, name: str, delimiter: str) -> list[str]:
    """Read the column names from the start; `source` is then after them."""
    _, _, names = next(_records(source, delimiter, 0), (0, 0, list[str]()))
    if isinstance(names, str):
        problem = names
    elif len(set(names)) < len(names):
        problem = f"a column is named twice: {', '.join(names)}"
    elif any(map(_has_surrogates, names)):
        problem = _not_utf8(delimiter.join(names).encode("utf-8", "surrogateescape"), 0)
    else:
        return names
    raise UserError(f"the header of the csv file {name} can't be used: {problem}", field=FIELD)


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _records(source: _Lines, delimiter: str, row: int) -> Iterator[_Record]:
    """Yield every record from the position of `source` on, the first as number `row`."""
    csv.field_size_limit(2**31 - 1)  # _Lines bounds a record; the module's own 128 kB would fail honest rows
    while line := source.next_line():
        offset, first = source.offset - len(line), _unmarked(line)
        if not first.strip(b"\r\n"):
            continue
        used: list[bytes] = []
        try:
            yield row, offset, next(csv.reader(_decode(source, first, used), delimiter=delimiter, strict=True))
        except (csv.Error, StopIteration) as error:
            source.push_back(used)
            yield row, offset, f"not a csv record: {str(error) or 'the quotes do not end'}"
        row += 1


def _decode(source: _Lines, first: bytes, used: list[bytes]) -> Iterator[str]:
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
        self.offset += len(line)
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            self.offset += _skip_line(self._stream)
        return line

    def push_back(self, lines: list[bytes]) -> None:
        """The next lines will be these again."""
        self._again.extendleft(reversed(lines))
        self.offset -= sum(map(len, lines))
