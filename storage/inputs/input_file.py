"""One input of a job, as plans and readers speak of it."""

from __future__ import annotations

from dataclasses import dataclass

FIELD = "input.path"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input, plain and JSON-able: where it is, which version of it, and how to read it.

    `name` is relative to the input's root and stable when the data moves; row ids are made of it. `format` is one of
    jsonl, parquet, arrow, csv, txt, text (a whole file) and hf. `size` is in bytes (of hf in rows), `mtime_s` Unix
    time; they and `etag` are None where the place doesn't say. `sha256` is that of the content, None where it is not known
    (storage/inputs/contents.py). `delimiter` is that of a csv file, None for what its ending says.
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
