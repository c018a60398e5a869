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

from actors.id_hashes import id_hashes

BUCKETS = 256
HASH_BYTES = 16

Hashes = NDArray[np.void]

_RECORD = np.dtype([("high", ">u8"), ("low", ">u8")])


class IdIndex:
    """Collects hashes of ids, and then tells which ids are among them. A context manager, since it owns a folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="draftmill-ids-")
        self._sorted: dict[int, tuple[NDArray[np.uint64], NDArray[np.uint64]]] | None = None
        self.added = 0

    def __enter__(self) -> IdIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sorted = None
        self._folder.cleanup()

    def add(self, hashes: Hashes) -> None:
        """Add hashes, as `hashes_of` gives them; not after the first look-up."""
        assert self._sorted is None, "ids are added before any is looked up"
        self.added += len(hashes)
        for bucket, part in _buckets(hashes):
            with self._path(bucket).open("ab") as file:
                file.write(hashes[part].tobytes())

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Of each id whether it was added."""
        if self._sorted is None:
            self._sorted = {bucket: self._sort(bucket) for bucket in range(BUCKETS) if self._path(bucket).exists()}
        hashes = hashes_of(ids)
        found = np.zeros(len(hashes), dtype=bool)
        for bucket, part in _buckets(hashes):
            if bucket in self._sorted:
                found[part] = _among(hashes[part], *self._sorted[bucket])
        return found

    def _path(self, bucket: int) -> Path:
        return Path(self._folder.name, f"{bucket:02x}")

    def _sort(self, bucket: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The bucket's distinct hashes in order, as two files of numbers that are mapped into memory."""
        high, low = _distinct(np.fromfile(self._path(bucket), dtype=_RECORD))
        self._path(bucket).unlink()
        return self._mapped(high, f"{bucket:02x}.high"), self._mapped(low, f"{bucket:02x}.low")

    def _mapped(self, numbers: NDArray[np.uint64], name: str) -> NDArray[np.uint64]:
        path = Path(self._folder.name, name)
        numbers.tofile(path)
        return np.memmap(path, dtype=np.uint64, mode="r")


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
