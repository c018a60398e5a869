"""A bounded cache of blocks of store objects, filled ahead by a few threads, and objects as files that read through it.

Each access to an object store has a high latency, even for few bytes. Rows of a unit lie in many places, perhaps in a
thousand files, so the places are fetched in parallel. Nothing here knows rows or formats.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from draftmill.storage.stores.store import NotFound, ReadStore, Store

T = TypeVar("T")

BLOCK_BYTES = 4 * 2**20
KEPT_BYTES = 40 * BLOCK_BYTES
"""More than the texts of most windows (jobs/packing.WINDOW_TOKENS), whose units read the same blocks in turn."""

AHEAD_BYTES = 8 * BLOCK_BYTES
AHEAD = 64
"""The most blocks that are fetched ahead, and their most bytes."""

THREADS = 16
AHEAD_BLOCKS = 2
PLACES = 8
"""The number of positions of an object that may be read in parallel."""

ENTRY_BYTES = 2**10
"""The overhead of a block beside its bytes, which matters for very many small files."""


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of an object from `index` * BLOCK_BYTES on. Another version than `etag` is a Conflict."""

    store: ReadStore
    name: str
    etag: str | None
    object_size: int
    index: int

    @property
    def size(self) -> int:
        """Number of its bytes."""
        return max(0, min(BLOCK_BYTES, self.object_size - self.index * BLOCK_BYTES))

    def read(self) -> bytes:
        """Ask the store for it."""
        return self.store.get_range(self.name, self.index * BLOCK_BYTES, BLOCK_BYTES, etag=self.etag)


class BlockCache:
    """The most recently used blocks, `kept_bytes` in all. Parallel requests for a block share one fetch."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES, threads: int = THREADS) -> None:
        self._kept_bytes = kept_bytes
        self._most_threads = threads
        self._lock = threading.Lock()
        self._futures: OrderedDict[Block, Future[bytes]] = OrderedDict()
        self._bytes = 0
        self._queue: SimpleQueue[tuple[Block, Future[bytes]]] = SimpleQueue()
        self._threads = 0

    def get(self, block: Block) -> bytes:
        """Return a block's bytes; raises what the store raises."""
        future, is_new = self._future(block)
        if is_new:
            self._fetch(block, future)
        return future.result()

    def fetch(self, block: Block) -> None:
        """Let a thread fetch the block, unless it is cached or being fetched."""
        future, is_new = self._future(block)
        if is_new:
            self._queue.put((block, future))
            self._start_thread()

    def _future(self, block: Block) -> tuple[Future[bytes], bool]:
        with self._lock:
            is_new = block not in self._futures
            future = self._futures.setdefault(block, Future())
            self._futures.move_to_end(block)
            return future, is_new

    def _fetch(self, block: Block, future: Future[bytes]) -> None:
        try:
            data = block.read()
        except BaseException as error:  # noqa: BLE001 - others may wait for this block, whatever the error
            with self._lock:
                self._futures.pop(block, None)  # the next request retries
            future.set_exception(error)
            return
        future.set_result(data)
        with self._lock:
            self._bytes += len(data) + ENTRY_BYTES
            while self._bytes > self._kept_bytes:
                oldest = next(block for block, future in self._futures.items() if future.done())
                self._bytes -= len(self._futures.pop(oldest).result()) + ENTRY_BYTES

    def _start_thread(self) -> None:
        # Daemons: the program can exit without waiting for speculative fetches.
        with self._lock:
            if self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._work, name="blocks", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._fetch(*self._queue.get())


BLOCKS = BlockCache()
"""The blocks of this process."""


def ahead(items: Iterable[T], blocks_of: Callable[[T], Iterable[Block]], *, blocks: BlockCache = BLOCKS) -> Iterator[T]:
    """Yield the items while the blocks of the next ones are being fetched."""
    waiting: deque[tuple[T, int, int]] = deque()
    count = num_bytes = 0
    for item in items:
        item_blocks = list(blocks_of(item))
        size = sum(block.size for block in item_blocks)
        while waiting and (max(len(waiting), count + len(item_blocks)) > AHEAD or num_bytes + size > AHEAD_BYTES):
            first, its_count, its_bytes = waiting.popleft()
            count, num_bytes = count - its_count, num_bytes - its_bytes
            yield first
        if len(item_blocks) <= AHEAD and size <= AHEAD_BYTES:
            for block in item_blocks:
                blocks.fetch(block)
        waiting.append((item, len(item_blocks), size))
        count, num_bytes = count + len(item_blocks), num_bytes + size
    yield from (item for item, _, _ in waiting)


class SeekableFile(io.RawIOBase):
    """A file with a position, read by `_read`; its size is None while unknown, and no offset can then count from the end."""

    def __init__(self, size: int | None) -> None:
        self._size, self._position = size, 0

    def _read(self, length: int) -> bytes:
        """Up to `length` bytes from the position on; none at the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        assert base is not None, "the end is unknown"
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class RangeFile(SeekableFile):
    """An object of a store as a seekable file of `size` bytes; its blocks are shared with others.

    When blocks are read one after the other the next ones are fetched ahead. A Parquet file is read at several places at once,
    one for each column.
    """

    def __init__(self, store: ReadStore, name: str, etag: str | None, size: int) -> None:
        super().__init__(size)
        self._object, self._object_size = (store, name, etag, size), size
        self._recent: deque[int] = deque(maxlen=PLACES)

    def _read(self, length: int) -> bytes:
        if self._position >= self._object_size:
            return b""
        index, inside = divmod(self._position, BLOCK_BYTES)
        if index not in self._recent:
            if index - 1 in self._recent:
                for coming in range(index, min(index + 1 + AHEAD_BLOCKS, -(-self._object_size // BLOCK_BYTES))):
                    BLOCKS.fetch(Block(*self._object, coming))
            self._recent.append(index)
        return BLOCKS.get(Block(*self._object, index))[inside : inside + length]


def open_object(store: Store, name: str) -> io.BufferedReader:
    """Return an object as a seekable stream that fetches only the blocks it needs; NotFound if there is none.

    For example for a Parquet file of which a reader needs one row group.
    """
    stat = store.stat(name)
    if stat is None:
        raise NotFound(f"{store.url}/{name} does not exist")
    return io.BufferedReader(RangeFile(store, name, stat.etag, stat.size), 2**16)
