"""InputFile, the description of one input that plans and readers share."""

from __future__ import annotations

from dataclasses import dataclass

FIELD = "input.path"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input as plain JSON-able data: its location, its version, and how to read it.

    `name` is relative to the input's root and stable when the data moves; row ids contain it. `format` is one of
    jsonl, parquet, arrow, csv, txt, text (a whole file) and hf. `size` is in bytes (of hf in rows), `mtime_s` Unix
    time; they and `etag` are None if the place does not provide them. `sha256` is that of the content, None if unknown
    (storage/inputs/contents.py). `delimiter` is that of a csv file; None takes the one of the file's ending.
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
