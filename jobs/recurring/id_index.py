"""A set of ids of any size, in files of a temporary folder: 16 bytes an id on disk, and in memory a 256th of that at a time.

Ids are hashed to 128 bits. They are partitioned by their first byte, each part is sorted, and look-ups search the sorted parts,
which are mapped into memory. Among a billion ids two have the same hash with a probability below 1e-20.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.actors.rows.row import id_hashes

BUCKETS = 256
HASH_BYTES = 16

Hashes = NDArray[np.void]

_RECORD = np.dtype([("high", ">u8"), ("low", ">u8")])


class IdIndex:
    """Collects hashes of ids, and then tells which ids are among them. A context manager, since it owns a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="draftmill-ids-")
        self._columns: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = None
        self.added = 0

    def __enter__(self) -> IdIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._columns = None
        self._folder.cleanup()

    def add(self, hashes: Hashes) -> None:
        """Add hashes, as `hashes_of` gives them; not after the first look-up."""
        assert self._columns is None, "ids are added before any is looked up"
        self.added += len(hashes)
        for bucket, part in _buckets(hashes):
            with self._path(f"{bucket:02x}").open("ab") as file:
                file.write(hashes[part].tobytes())

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Of each id whether it was added."""
        if not self.added:
            return np.zeros(len(ids), dtype=bool)
        if self._columns is None:
            self._columns = self._sorted()
        return _among(hashes_of(ids), *self._columns)

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _sorted(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """All distinct hashes in order, as two columns of numbers that are mapped into memory; sorts a bucket at a time."""
        with self._path("high").open("wb") as highs, self._path("low").open("wb") as lows:
            for bucket in range(BUCKETS):
                path = self._path(f"{bucket:02x}")
                if path.exists():
                    high, low = _distinct(np.fromfile(path, dtype=_RECORD))
                    high.tofile(highs)
                    low.tofile(lows)
                    path.unlink()
        high, low = (np.memmap(self._path(name), dtype=np.uint64, mode="r") for name in ("high", "low"))
        return high, low


def hashes_of(ids: Sequence[str]) -> Hashes:
    """The hashes of ids."""
    return np.frombuffer(id_hashes(ids), dtype=_RECORD)


def hashes_in(column: pa.ChunkedArray) -> Hashes:
    """The hashes of a column of 16 bytes each."""
    data = column.combine_chunks().buffers()[1] if len(column) else None
    return np.empty(0, dtype=_RECORD) if data is None else np.frombuffer(data, dtype=_RECORD, count=len(column))


def column_of(hashes: Hashes, *, without: Hashes) -> pa.Array:
    """Hashes as a column of 16 bytes each, sorted, each once; those in `without` are left out."""
    high, low = _distinct(hashes)
    ordered = np.empty(len(high), dtype=_RECORD)
    ordered["high"], ordered["low"] = high, low
    ordered = ordered[~_among(ordered, *_distinct(without))]
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(HASH_BYTES), len(ordered), [None, pa.py_buffer(ordered.tobytes())]
    )


def _buckets(hashes: Hashes) -> list[tuple[int, NDArray[np.int64]]]:
    """The numbers of the hashes in each bucket."""
    bucket = (hashes["high"] >> np.uint64(56)).astype(np.int64)
    order = np.argsort(bucket, kind="stable")
    edges = np.searchsorted(bucket[order], np.arange(BUCKETS + 1)).tolist()
    return [(number, order[start:end]) for number, (start, end) in enumerate(pairwise(edges)) if start < end]


def _distinct(hashes: Hashes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The distinct hashes in order, as two columns of numbers."""
    high, low = hashes["high"].astype(np.uint64), hashes["low"].astype(np.uint64)
    order = np.lexsort((low, high))
    high, low = high[order], low[order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return high[is_first], low[is_first]


def _among(hashes: Hashes, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.bool_]:
    wanted_high, wanted_low = hashes["high"].astype(np.uint64), hashes["low"].astype(np.uint64)
    start, end = np.searchsorted(high, wanted_high, "left"), np.searchsorted(high, wanted_high, "right")
    found = np.zeros(len(hashes), dtype=bool)
    for number in np.flatnonzero(start < end).tolist():  # as a rule one entry each
        found[number] = bool((low[start[number] : end[number]] == wanted_low[number]).any())
    return found
