"""Row, the type that every reader yields, and the size limits of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmill.storage.errors import RowError, UserError, printable
from draftmill.storage.inputs.input_file import FIELD, InputFile

MAX_ROW_BYTES = 64 * 2**20
"""The longest line or text file that becomes a row, decompressed; a longer one is a failed row."""


@dataclass(slots=True)
class Row:
    """One row of an input: its values by the file's own column names, or an error instead.

    `row` counts from 0 in its file: lines for jsonl and txt (blank jsonl lines are counted, but yield no rows),
    records for the others. `offset` is in bytes where the (decompressed) file can be read from there, else None.
    """

    row: int
    offset: int | None
    values: dict[str, Any] | None
    error: RowError | None = None


def default_id(file: InputFile, row: int) -> str:
    """The id of a row without its own: the file's name below the input's root, and the row."""
    return f"{file.name}:{row}"


def failed(row: int, offset: int | None, kind: str, message: str) -> Row:
    """A row that could not be read; `kind` is bad_encoding, bad_json or bad_row."""
    return Row(row, offset, None, RowError(kind, "read", message))


def damaged(file: InputFile, row: int, reason: object) -> UserError:
    """The error of a broken container: later rows are lost, which must not happen silently."""
    said = printable(" ".join(str(reason).split()))[:500]
    return UserError(f"{file.uri}: damaged or not {file.format} after row {row}: {said}", field=FIELD)
