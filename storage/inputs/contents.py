"""Hashes of local input files, which recognise a file that was only touched or copied.

On S3 the etag does this, and a listing contains it. A file is hashed when the job is planned, which reads it anyway, and again
only if its date has changed since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from draftmill.storage.inputs.inputs import STDLIB
from draftmill.storage.inputs.rows import FIELD, InputFile
from draftmill.storage.inputs.sources import open_bytes
from draftmill.storage.stores.interface import about
from draftmill.storage.stores.parallel import thread_pool

_MOST_THREADS = 4
"""Hashing threads. Hashing releases the interpreter's lock; disks gain nothing from more threads."""


def hashed(files: Sequence[InputFile], *, most_bytes: int | None = None) -> list[InputFile]:
    """Return the files, local ones with the SHA-256 of their content; those above `most_bytes` are identified by date alone.

    Raises ChangedInput where a file has changed since it was listed.
    """
    return _each(files, lambda file: _hashed(file) if _wants_hash(file, most_bytes) else file)


def num_bytes_to_hash(files: Iterable[InputFile], most_bytes: int | None = None) -> int:
    """How much `hashed` reads."""
    return sum(file.size or 0 for file in files if _wants_hash(file, most_bytes))


def recognised(files: Sequence[InputFile], known: Mapping[str, InputFile]) -> list[InputFile]:
    """Return the files, each with its hash if an earlier listing (name -> file) has one.

    A file with the same size and date counts as the same; with another date it is hashed. With another size it stays as it is.
    """
    return _each(files, lambda file: _recognised(file, known.get(file.name)))


def _recognised(file: InputFile, before: InputFile | None) -> InputFile:
    if before is None or before.sha256 is None or not _wants_hash(file, None) or file.size != before.size:
        return file
    return replace(file, sha256=before.sha256) if file.mtime_s == before.mtime_s else _hashed(file)


def _each(files: Sequence[InputFile], change: Callable[[InputFile], InputFile]) -> list[InputFile]:
    with thread_pool(min(_MOST_THREADS, os.cpu_count() or 1), "contents") as threads:
        return list(threads.map(change, files))


def _wants_hash(file: InputFile, most_bytes: int | None) -> bool:
    is_local = "://" not in file.uri and not file.uri.startswith(f"{STDLIB}/") and file.sha256 is None
    return is_local and (most_bytes is None or (file.size or 0) <= most_bytes)


def _hashed(file: InputFile) -> InputFile:
    with about(FIELD), open_bytes(file) as stream:
        return replace(file, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
