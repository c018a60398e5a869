"""Opens inputs as buffered byte streams: local disk or S3, plain or compressed.

Memory is constant: a stream holds one buffer, and S3 blocks are cached up to a fixed size. Compressed files that are read at
random positions are in storage/inputs/spools.py.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.input_file import FIELD, InputFile
from draftmill.storage.inputs.inputs import local_path
from draftmill.storage.inputs.rows import damaged
from draftmill.storage.stores.interface import Conflict, NotFound, S3Options, Store
from draftmill.storage.stores.local import translated
from draftmill.storage.stores.object_parts import BLOCK_BYTES, BLOCKS, Block
from draftmill.storage.stores.store import open_store

T = TypeVar("T")

BUFFER_BYTES = 2**20
UNPACKED_BYTES = 2**30
MAX_RATIO = 256
"""A compressed input may unpack to UNPACKED_BYTES, and beyond that to MAX_RATIO times its own size. Texts and logs stay far
below; a file made to fill a disk does not."""


def open_bytes(file: InputFile, *, s3: S3Options | None = None, buffer_bytes: int = BUFFER_BYTES) -> io.BufferedReader:
    """Return the file's bytes as stored, seekable. Raises StoreError, or NotFound instead of FileNotFoundError.

    Opening and reading raise Conflict where the file is not the one that was listed or planned.
    """
    if file.uri.startswith("s3://"):
        return io.BufferedReader(_s3_file(file, s3), buffer_bytes)
    with translated(local_path(file)):
        return io.BufferedReader(_LocalFile(file), buffer_bytes)


def open_stream(file: InputFile, *, s3: S3Options | None = None) -> io.BufferedReader:
    """Return the file's content, decompressed, from the front; seekable only if it is not compressed.

    Damaged compression is a UserError while reading.
    """
    source = open_bytes(file, s3=s3)
    if file.compression is None:
        return source
    return io.BufferedReader(_Decompressed(file, source), BUFFER_BYTES)


class _LocalFile(io.FileIO):
    """A local file that is checked when it is opened, and after each read."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(local_path(file))
        self._file, self._opened = file, os.fstat(self.fileno())
        check_same(file, self._opened)

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        return self._unchanged(super().readinto(buffer))

    def readall(self) -> bytes:
        """See io.RawIOBase."""
        return self._unchanged(super().readall())

    def _unchanged(self, found: T) -> T:
        now = os.fstat(self.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise _changed(self._file, "it was written to while it was read")
        return found


Stamp = tuple[int, int, int]
"""What a write or a replacement changes of a local file: inode, size, and date in nanoseconds."""


def stamp_of(file: InputFile) -> Stamp | None:
    """The stamp of a local file as it is now; None if it is missing, or not local."""
    if file.uri.startswith("s3://"):
        return None
    try:
        found = local_path(file).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_same(file: InputFile, found: os.stat_result) -> None:
    """Raise Conflict unless a local file is the one that was listed or planned, by its size and date.

    With another date, as that of a copy on another machine, its content decides.
    """
    if file.size is not None and found.st_size != file.size:
        raise _changed(file, f"{found.st_size:,} bytes instead of {file.size:,}")
    if file.mtime_s in {None, found.st_mtime}:
        return
    path = local_path(file)
    if file.sha256 is None or _content_hash(path, found.st_mtime_ns) != file.sha256:
        raise _changed(file, "another date" if file.sha256 is None else "another content")


def _changed(file: InputFile, what: str) -> Conflict:
    return Conflict(f"{file.uri} has changed since it was listed: {what}")


@lru_cache(maxsize=256)
def _content_hash(path: Path, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


AHEAD_BLOCKS = 2
PLACES = 8
"""The number of positions of an object that may be read in parallel."""


class _Decompressed(io.RawIOBase):
    """gzip (any number of members) or zstd (any number of frames); unlike the standard library's readers it detects a
    truncated stream."""

    def __init__(self, file: InputFile, source: io.BufferedReader) -> None:
        self._file, self._source = file, source
        self._stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), file.compression)
        self._size = 0

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise damaged(self._file, 0, f"{self._file.compression} at byte {self._size}: {error}") from None
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > UNPACKED_BYTES and self._size > MAX_RATIO * self._source.tell():
            raise _bomb(self._file, self._size, self._source.tell())
        return len(data)

    def close(self) -> None:
        """See io.RawIOBase."""
        self._source.close()
        super().close()


def _bomb(file: InputFile, unpacked: int, packed: int) -> UserError:
    sizes = f"{packed:,} bytes of {file.compression} unpack to {unpacked:,} and more, over {MAX_RATIO} times as much"
    return UserError(f"{file.uri}: {sizes}; if that is intended, unpack the file first", field=FIELD)


class RangeFile(io.RawIOBase):
    """An object of a store as a seekable file; its blocks are shared with others (storage/stores/object_parts.py).

    When blocks are read one after the other the next ones are fetched ahead. A Parquet file is read at several places at once,
    one for each column.
    """

    def __init__(self, store: Store, name: str, etag: str | None, size: int) -> None:
        self._object = (store, name, etag)
        self._size, self._position = size, 0
        self._recent: deque[int] = deque(maxlen=PLACES)

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        if self._position >= self._size:
            return 0
        index, inside = divmod(self._position, BLOCK_BYTES)
        if index not in self._recent:
            self._fetch_behind(index)
        data = BLOCKS.get(Block(*self._object, index, self._size))[inside : inside + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _fetch_behind(self, index: int) -> None:
        is_next = index - 1 in self._recent
        self._recent.append(index)
        if not is_next:
            return
        for coming in range(index, min(index + 1 + AHEAD_BLOCKS, -(-self._size // BLOCK_BYTES))):
            BLOCKS.fetch(Block(*self._object, coming, self._size))


def open_object(store: Store, name: str) -> io.BufferedReader:
    """Return an object as a seekable stream that fetches only the blocks it needs; NotFound if there is none.

    For example for a Parquet file of which a reader needs one row group.
    """
    stat = store.stat(name)
    if stat is None:
        raise NotFound(f"{store.url}/{name} does not exist")
    return io.BufferedReader(RangeFile(store, name, stat.etag, stat.size), 2**16)


def _s3_file(file: InputFile, s3: S3Options | None) -> RangeFile:
    assert file.size is not None, "a listing on S3 tells sizes"
    return RangeFile(*_object(file, s3), file.size)


def _object(file: InputFile, s3: S3Options | None) -> tuple[Store, str, str | None]:
    bucket, _, key = file.uri.removeprefix("s3://").partition("/")
    return _bucket(bucket, s3), key, file.etag


def blocks_at(file: InputFile, offsets: Iterable[int], s3: S3Options | None) -> list[Block]:
    """The blocks of a file on S3 that are needed to read from these offsets; none for a local file."""
    if not file.uri.startswith("s3://"):
        return []
    assert file.size is not None, "a listing on S3 tells sizes"
    indexes = sorted({offset // BLOCK_BYTES for offset in offsets})
    return [Block(*_object(file, s3), index, file.size) for index in indexes]


@lru_cache(maxsize=4)
def _bucket(bucket: str, s3: S3Options | None) -> Store:
    return open_store(f"s3://{bucket}", s3=s3)
