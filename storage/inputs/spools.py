"""Random access to compressed files: recently unpacked content is kept in temporary files.

A compressed file can only be unpacked from its front. The units of a window lie in one stretch of it, and the next window comes
after it, so a reader that continues from its position unpacks a file once, whatever its size. It starts again only if a read
goes back further than the kept content.
"""

from __future__ import annotations

import io
import tempfile
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import IO, Any

from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.input_file import InputFile
from draftmill.storage.inputs.sources import open_stream
from draftmill.storage.stores.interface import S3Options

KEPT_BYTES = 4 * 2**30
"""Bytes of temporary files per reading process."""

PIECE_BYTES = 64 * 2**20
HEAD_BYTES = 2**20
"""Bytes at the start of a file that are kept while it is open: a csv file's header is there."""

READ_BYTES = 2**18
SEEK_BUFFER_BYTES = 2**16
"""Rows at random places are mostly short: larger reads would be discarded."""

MOST_FILES = 64


@dataclass(slots=True)
class Piece:
    """Bytes [start, end) of the content, in an unnamed file, or in memory if the disk is full."""

    start: int
    end: int
    file: IO[bytes]


class Unpacked(io.RawIOBase):
    """The content of a compressed file, seekable. Keeps at most `kept_bytes` and the head."""

    def __init__(self, file: InputFile, s3: S3Options | None, kept_bytes: int) -> None:
        self._source = (file, s3)
        self._kept_bytes = kept_bytes
        self._position = 0
        self._begin()

    def _begin(self) -> None:
        self._stream: io.BufferedReader | None = None
        self._head = io.BytesIO()
        self._pieces: deque[Piece] = deque()
        self._end = 0
        self._at_end = False

    def _begin_again(self) -> None:
        self._close_all()
        self._begin()

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        return sum(piece.end - piece.start for piece in self._pieces)

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase; seeking from the end is not supported, since it is unknown."""
        assert whence in {io.SEEK_SET, io.SEEK_CUR}
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase. Raises UserError for damaged compression."""
        start = self._pieces[0].start if self._pieces else self._end
        if len(self._head.getbuffer()) <= self._position < start:
            self._begin_again()
        while self._position >= self._end and not self._at_end:
            self._unpack()
        data = self._kept(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        """See io.RawIOBase."""
        self._close_all()
        super().close()

    def _kept(self, position: int, size: int) -> bytes:
        if position < len(self._head.getbuffer()):
            self._head.seek(position)
            return self._head.read(size)
        for piece in reversed(self._pieces):
            if piece.start <= position < piece.end:
                piece.file.seek(position - piece.start)
                return piece.file.read(min(size, piece.end - position))
        return b""

    def _unpack(self) -> None:
        try:
            if self._stream is None:
                self._stream = open_stream(self._source[0], s3=self._source[1])
            data = self._stream.read(READ_BYTES)
        except (OSError, UserError, StoreError):
            self._begin_again()  # otherwise the next read would look like the end
            raise
        self._at_end = not data
        room = HEAD_BYTES - len(self._head.getbuffer())
        if room > 0:
            self._head.seek(0, io.SEEK_END)
            self._head.write(data[:room])
        self._keep(data)
        self._end += len(data)

    def _keep(self, data: bytes) -> None:
        if not self._pieces or self._pieces[-1].end - self._pieces[-1].start >= PIECE_BYTES:
            self._pieces.append(Piece(self._end, self._end, _unnamed_file()))
        while self.num_bytes + len(data) > self._kept_bytes and len(self._pieces) > 1:
            self._drop()
        last = self._pieces[-1]
        while not _written(last, data):
            if len(self._pieces) > 1:
                self._drop()
            else:  # using memory is better than failing the job
                last.start, last.end, last.file = self._end, self._end, io.BytesIO()
        last.end += len(data)

    def _drop(self) -> None:
        self._pieces.popleft().file.close()

    def _close_all(self) -> None:
        while self._pieces:
            self._drop()
        if self._stream is not None:
            self._stream.close()


def _unnamed_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="draftmill-", buffering=0)
    except OSError:
        return io.BytesIO()


def _written(piece: Piece, data: bytes) -> bool:
    """Append to the piece; False if the disk is full."""
    try:
        piece.file.seek(piece.end - piece.start)
        view = memoryview(data)
        while view:
            view = view[piece.file.write(view) :]
    except OSError:
        return False
    return True


class Spools:
    """The most recently read compressed files, `kept_bytes` in all."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._open: OrderedDict[tuple[InputFile, S3Options | None], tuple[Unpacked, io.BufferedReader]] = OrderedDict()

    def open(self, file: InputFile, s3: S3Options | None) -> io.BufferedReader:
        """Return the file's content, seekable; it stays open here."""
        found = self._open.pop((file, s3), None)
        if found is None:
            unpacked = Unpacked(file, s3, self._kept_bytes // 2)
            found = unpacked, io.BufferedReader(unpacked, SEEK_BUFFER_BYTES)
        self._open[file, s3] = found
        while len(self._open) > 1 and (self.num_bytes > self._kept_bytes // 2 or len(self._open) > MOST_FILES):
            self._open.popitem(last=False)[1][1].close()
        return found[1]

    @property
    def num_bytes(self) -> int:
        """The bytes kept of all files."""
        return sum(unpacked.num_bytes for unpacked, _ in self._open.values())
