"""What plans and readers share: InputFile, one input; InputFiles, many; Slice, a part of one; Row, what every reader yields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from draftmill.storage.errors import RowError, UserError, printable
from draftmill.storage.stores.store import S3_DEFAULTS, S3Options

FIELD = "input.path"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input: its location, its version, and how to read it. Plain JSON-able data, but for `s3`.

    `name` is relative to the input's root and stable when the data moves; row ids contain it. `format` is one of
    jsonl, parquet, arrow, csv, txt, text (a whole file) and hf. `size` is in bytes (of hf in rows), `mtime_s` Unix
    time; they and `etag` are None if the place does not provide them. `sha256` is that of the content, None if unknown
    (storage/inputs/sources.py). `delimiter` is that of a csv file; None takes the one of the file's ending. `s3` is how an object
    on S3 is reached: it belongs to the job, and is not stored with the file.
    """

    uri: str
    name: str
    size: int | None
    etag: str | None
    mtime_s: float | None
    format: str
    compression: str | None = None
    sha256: str | None = None
    delimiter: str | None = None
    s3: S3Options = S3_DEFAULTS

    def facts(self) -> dict[str, Any]:
        """What a plan stores of the file."""
        return {name: getattr(self, name) for name in _FACTS}


_FACTS = [item.name for item in fields(InputFile) if item.name != "s3"]


class InputFiles(Sequence[InputFile]):
    """Inputs as JSON in one buffer: of a million of them, Python objects would take half a gigabyte in each worker."""

    def __init__(self, files: Iterable[InputFile], s3: S3Options = S3_DEFAULTS) -> None:
        lines = (json.dumps(list(file.facts().values())).encode() for file in files)
        self._lines, self._s3 = pa.array(lines, pa.large_binary()), s3

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return InputFile(*[*json.loads(self._lines[index].as_py()), self._s3])


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Part of a file, from row `row`, which begins at byte `offset`; the default is the whole file.

    The slice ends with the last line that begins before byte `end`; a slice of a Parquet file is the row groups
    [`groups[0]`, `groups[1]`).
    """

    row: int = 0
    offset: int = 0
    end: int | None = None
    groups: tuple[int, int] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the slice begins with the file."""
        return self.row == 0 and self.offset == 0


WHOLE = FileSlice()


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


def failed_row(row: int, offset: int | None, kind: str, message: str) -> Row:
    """A row that could not be read; `kind` is bad_encoding, bad_json or bad_row."""
    return Row(row, offset, None, RowError(kind, "read", message))


def damage_error(file: InputFile, row: int, reason: object) -> UserError:
    """The error of a broken container: later rows are lost, which must not happen silently."""
    text = printable(" ".join(str(reason).split()))[:500]
    return UserError(f"{file.uri}: damaged or not {file.format} after row {row}: {text}", field=FIELD)
