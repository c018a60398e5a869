"""Opens inputs as buffered byte streams: local disk or a bucket, plain or compressed, from the front or at random positions.

Memory is constant: a stream holds one buffer, and blocks of objects are cached up to a fixed size. A local file is identified by
its size and mtime, or by a hash of its content, which recognises a file that was only touched or copied. It is hashed when the
job is planned, which reads it anyway. In a bucket the etag does this, and a listing contains it.

A compressed file can only be unpacked from its front, so recently unpacked content is kept in temporary files. The units of a
window lie in one stretch of the file, and the next window comes after it: a reader that continues from its position unpacks a
file once, whatever its size. It starts again only if a read goes back further than the kept content.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa

from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.inputs import STDLIB, is_object, local_path, open_bucket
from draftmill.storage.inputs.rows import FIELD, InputFile, damage_error
from draftmill.storage.stores.block_cache import BLOCK_BYTES, Block, RangeFile, SeekableFile
from draftmill.storage.stores.local import translate_errors
from draftmill.storage.stores.parallel import thread_pool
from draftmill.storage.stores.store import Conflict, Place, ReadStore, about, is_local

T = TypeVar("T")

BUFFER_BYTES = 2**20
UNPACKED_BYTES = 2**30
MAX_RATIO = 256
"""A compressed input may unpack to UNPACKED_BYTES, and beyond that to MAX_RATIO times its own size. Texts and logs stay far
below; a file made to fill a disk does not."""

KEPT_BYTES = 4 * 2**30
"""Bytes of temporary files per reading process."""

MEMORY_BYTES = 64 * 2**20
"""What is kept of a file in memory where the disk has no room for it."""

HEAD_BYTES = 2**20
"""Bytes at the start of a file that are kept while it is open: a csv file's header is there."""

READ_BYTES = 2**18
SEEK_BUFFER_BYTES = 2**16
"""Rows at random places are mostly short: larger reads would be discarded."""

MOST_FILES = 64


def open_bytes(file: InputFile, *, buffer_bytes: int = BUFFER_BYTES) -> io.BufferedReader:
    """Return the file's bytes as stored, seekable. Raises StoreError, or NotFound instead of FileNotFoundError.

    Opening and reading raise Conflict where the file is not the one that was listed or planned.
    """
    if is_object(file):
        return io.BufferedReader(RangeFile(*_object(file)), buffer_bytes)
    with translate_errors(local_path(file)):
        return io.BufferedReader(_LocalFile(file), buffer_bytes)


def open_stream(file: InputFile) -> io.BufferedReader:
    """Return the file's content, decompressed, from the front; seekable only if it is not compressed.

    Damaged compression is a UserError while reading.
    """
    source = open_bytes(file)
    if file.compression is None:
        return source
    return io.BufferedReader(_Decompressed(file, source), BUFFER_BYTES)


class _LocalFile(io.FileIO):
    """A local file that is checked when it is opened, and after each read."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(local_path(file))
        self._file, self._stat = file, os.fstat(self.fileno())
        check_same(file, self._stat)

    def readinto(self, buffer: Any) -> int:
        return self._check(super().readinto(buffer))

    def readall(self) -> bytes:
        return self._check(super().readall())

    def _check(self, data: T) -> T:
        now = os.fstat(self.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise _change(self._file, "it was written to while it was read")
        return data


Stamp = tuple[int, int, int]
"""What a write or a replacement changes of a local file: inode, size, and mtime in nanoseconds."""


def stamp_of(file: InputFile) -> Stamp | None:
    """The stamp of a local file as it is now; None if it is missing, or not local."""
    if is_object(file):
        return None
    try:
        stat = local_path(file).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_same(file: InputFile, stat: os.stat_result) -> None:
    """Raise Conflict unless a local file is the one that was listed or planned, by its size and mtime.

    With another mtime, as that of a copy on another machine, its content decides.
    """
    if file.size is not None and stat.st_size != file.size:
        raise _change(file, f"{stat.st_size:,} bytes instead of {file.size:,}")
    if file.mtime_s in {None, stat.st_mtime}:
        return
    if file.sha256 is None or _content_hash(local_path(file), stat.st_mtime_ns) != file.sha256:
        raise _change(file, "another modification time" if file.sha256 is None else "another content")


def _change(file: InputFile, what: str) -> Conflict:
    return Conflict(f"{file.uri} has changed since it was listed: {what}")


@lru_cache(maxsize=256)
def _content_hash(path: Path, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Decompressed(io.RawIOBase):
    """gzip (any number of members, and zeros after them, as of a tape) or zstd (any number of frames)."""

    def __init__(self, file: InputFile, source: io.BufferedReader) -> None:
        self._file, self._source = file, source
        is_gzip = file.compression == "gzip"  # Arrow's reader takes no zeros
        self._stream = (
            gzip.GzipFile(fileobj=source)
            if is_gzip
            else pa.CompressedInputStream(pa.PythonFile(source, mode="r"), file.compression)
        )
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise damage_error(self._file, 0, f"{self._file.compression} at byte {self._size}: {error}") from None
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > UNPACKED_BYTES and self._size > MAX_RATIO * self._source.tell():
            packed = f"{self._source.tell():,} bytes of {self._file.compression} unpack to {self._size:,} and more"
            reason = f"{packed}, over {MAX_RATIO} times as much; if that is intended, unpack the file first"
            raise UserError(f"{self._file.uri}: {reason}", field=FIELD)
        return len(data)

    def close(self) -> None:
        self._source.close()
        super().close()


def _object(file: InputFile) -> tuple[ReadStore, str, str | None, int]:
    """The store, name, etag and size of an object."""
    assert file.size is not None, "a listing of a bucket tells sizes"
    return *open_bucket(Place(file.uri, file.s3)), file.etag, file.size


def blocks_at(file: InputFile, offsets: Iterable[int]) -> list[Block]:
    """The blocks of an object that are needed to read from these offsets; none for a local file."""
    if not is_object(file):
        return []
    return [Block(*_object(file), index) for index in sorted({offset // BLOCK_BYTES for offset in offsets})]


class _UnpackedFile(SeekableFile):
    """The content of a compressed file, seekable.

    Keeps the head, and the last `kept_bytes` in a ring: byte p is at p modulo its size, in an unnamed file.
    """

    def __init__(self, file: InputFile, kept_bytes: int) -> None:
        super().__init__(size=None)
        self._file, self._kept_bytes = file, kept_bytes
        self._stream: io.BufferedReader | None = None
        self._ring: IO[bytes] = io.BytesIO()
        self._begin()

    def _begin(self) -> None:
        """Go back to the front of the content, with nothing kept."""
        self._let_go()
        self._stream, self._at_end, self._head = None, False, io.BytesIO()
        self._start = self._end = 0  # of what the ring has
        try:
            self._ring = tempfile.TemporaryFile(prefix="draftmill-", buffering=0)  # noqa: SIM115 - until it is let go
            self._ring_bytes = self._kept_bytes
        except OSError:
            self._use_memory()

    def _use_memory(self) -> None:
        """Keep less from here on, in memory: that is better than failing the job."""
        self._ring, self._ring_bytes, self._start = io.BytesIO(), min(MEMORY_BYTES, self._kept_bytes), self._end

    def _let_go(self) -> None:
        self._ring.close()
        if self._stream is not None:
            self._stream.close()

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        return self._end - self._start

    def _read(self, length: int) -> bytes:
        """Raises UserError for damaged compression."""
        if len(self._head.getbuffer()) <= self._position < self._start:
            self._begin()
        while self._position >= self._end and not self._at_end:
            self._unpack()
        if self._position < self._start:
            self._head.seek(self._position)
            return self._head.read(length)
        place = self._position % self._ring_bytes
        self._ring.seek(place)
        return self._ring.read(max(0, min(length, self._end - self._position, self._ring_bytes - place)))

    def close(self) -> None:
        self._let_go()
        super().close()

    def _unpack(self) -> None:
        try:
            if self._stream is None:
                self._stream = open_stream(self._file)
            data = self._stream.read(READ_BYTES)
        except (OSError, UserError, StoreError):
            self._begin()  # otherwise the next read would look like the end
            raise
        self._at_end = not data
        room = HEAD_BYTES - len(self._head.getbuffer())
        if room > 0:
            self._head.seek(0, io.SEEK_END)
            self._head.write(data[:room])
        left = memoryview(data)
        while left:
            place = self._end % self._ring_bytes
            try:
                self._ring.seek(place)
                count = self._ring.write(left[: self._ring_bytes - place])
            except OSError:  # the disk is full
                if MEMORY_BYTES <= self._end < self._ring_bytes:
                    self._ring_bytes = self._end
                else:
                    self._ring.close()
                    self._use_memory()
                continue
            left, self._end = left[count:], self._end + count
            self._start = max(self._start, self._end - self._ring_bytes)


class DecompressionCache:
    """The most recently read compressed files, `kept_bytes` in all."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._open = OrderedDict[InputFile, tuple[_UnpackedFile, io.BufferedReader]]()

    def open(self, file: InputFile) -> io.BufferedReader:
        """Return the file's content, seekable; it stays open here."""
        entry = self._open.pop(file, None)
        if entry is None:
            unpacked = _UnpackedFile(file, self._kept_bytes // 2)
            entry = unpacked, io.BufferedReader(unpacked, SEEK_BUFFER_BYTES)
        self._open[file] = entry
        while len(self._open) > 1 and (self.num_bytes > self._kept_bytes // 2 or len(self._open) > MOST_FILES):
            self._open.popitem(last=False)[1][1].close()
        return entry[1]

    @property
    def num_bytes(self) -> int:
        """The bytes kept of all files."""
        return sum(unpacked.num_bytes for unpacked, _ in self._open.values())


_MOST_THREADS = 4
"""Hashing threads. Hashing releases the interpreter's lock; disks gain nothing from more threads."""


def with_hashes(files: Sequence[InputFile], *, most_bytes: int | None = None) -> list[InputFile]:
    """Return the files, local ones with the SHA-256 of their content; those above `most_bytes` are identified by mtime alone.

    Raises ChangedInput where a file has changed since it was listed.
    """
    return _map(lambda file: _with_hash(file) if _needs_hash(file, most_bytes) else file, files)


def num_bytes_to_hash(files: Iterable[InputFile], most_bytes: int | None = None) -> int:
    """How much `with_hashes` reads."""
    return sum(file.size or 0 for file in files if _needs_hash(file, most_bytes))


def with_known_hashes(files: Sequence[InputFile], known: Mapping[str, InputFile]) -> list[InputFile]:
    """Return the files, each with its hash if an earlier listing (name -> file) has one.

    A file with the same size and mtime counts as the same; with another mtime it is hashed. With another size it stays as it is.
    """

    def recognise(file: InputFile) -> InputFile:
        before = known.get(file.name)
        if before is None or before.sha256 is None or not _needs_hash(file, None) or file.size != before.size:
            return file
        return replace(file, sha256=before.sha256) if file.mtime_s == before.mtime_s else _with_hash(file)

    return _map(recognise, files)


def _map(change: Callable[[InputFile], InputFile], files: Sequence[InputFile]) -> list[InputFile]:
    with thread_pool(min(_MOST_THREADS, os.cpu_count() or 1), "contents") as threads:
        return list(threads.map(change, files))


def _needs_hash(file: InputFile, most_bytes: int | None) -> bool:
    is_file = is_local(file.uri) and not file.uri.startswith(f"{STDLIB}/") and file.sha256 is None
    return is_file and (most_bytes is None or (file.size or 0) <= most_bytes)


def _with_hash(file: InputFile) -> InputFile:
    with about(FIELD), open_bytes(file) as stream:
        return replace(file, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
