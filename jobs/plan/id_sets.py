"""Sets of ids of any size, in constant memory: finds an id that occurs twice, and tells which ids are among known ones.

Ids are hashed to 128 bits. The hashes are partitioned by their first byte into files of a temporary folder, so that equal ids are
in the same file, and one file at a time is sorted in memory. Among a billion ids two have the same hash with a probability below
1e-20.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.actors.rows.row import id_hashes

HELD_ROWS = 2**18
"""Rows kept in memory before they are written to the files."""

RowPlace = tuple[int, int]
"""(file, row)"""

Hashes = NDArray[np.bytes_]
"""[ids], of 16 bytes each: numpy compares them as memcmp does."""

HASH_BYTES = 16
_HASH = np.dtype(f"S{HASH_BYTES}")
_RECORD = np.dtype([("hash", _HASH), ("file", "<i4"), ("row", "<i8")])


def hashes_of(ids: Sequence[str]) -> Hashes:
    return np.frombuffer(id_hashes(ids), dtype=_HASH)


def hashes_in(column: pa.ChunkedArray) -> Hashes:
    """The hashes of a column of 16 bytes each."""
    if not len(column):
        return np.empty(0, dtype=_HASH)
    array = column.combine_chunks()
    return np.frombuffer(array.buffers()[1], dtype=_HASH, count=len(array), offset=HASH_BYTES * array.offset)


def column_of(hashes: Hashes, *, without: Hashes) -> pa.Array:
    """Hashes as a column of 16 bytes each, sorted, each once; those in `without` are skipped."""
    kept = np.setdiff1d(hashes, without)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(kept), [None, pa.py_buffer(kept.tobytes())])


class _Buckets(ExitStack):
    """Records of any number: from HELD_ROWS on they are in a temporary folder, in a file for each first byte of a hash."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._dtype = dtype
        self._held: list[NDArray[Any]] = []
        self._folder: Path | None = None

    def _keep(self, records: NDArray[Any]) -> None:
        self._held.append(records)
        if sum(map(len, self._held)) >= HELD_ROWS:
            if self._folder is None:
                self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="draftmill-ids-")))
            self._spread(self._folder)

    def _spread(self, folder: Path) -> None:
        records, self._held = np.concatenate([np.empty(0, self._dtype), *self._held]), []
        hashes = np.ascontiguousarray(records["hash"] if records.dtype.names else records)
        first = hashes.view(np.uint8).reshape(-1, HASH_BYTES)[:, 0]
        order = np.argsort(first, kind="stable")
        edges = np.searchsorted(first[order], np.arange(257))
        for byte, (start, end) in enumerate(pairwise(edges.tolist())):
            if start < end:
                with (folder / f"{byte:02x}").open("ab") as file:
                    file.write(records[order[start:end]].tobytes())

    def _parts(self) -> Iterator[NDArray[Any]]:
        """All records, in the order of their first bytes: equal hashes are in one part."""
        if self._folder is None:
            return iter([np.concatenate([np.empty(0, self._dtype), *self._held])])
        self._spread(self._folder)
        return (np.fromfile(path, dtype=self._dtype) for path in sorted(self._folder.glob("??")))


class DuplicateFinder(_Buckets):
    """Collects every id with its place; `first` then returns a duplicate. A context manager, since it owns a folder."""

    def __init__(self) -> None:
        super().__init__(_RECORD)

    def add(self, hashes: Hashes, files: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Add a batch: three arrays of equal length."""
        records = np.empty(len(rows), dtype=_RECORD)
        records["hash"], records["file"], records["row"] = hashes, files, rows
        self._keep(records)

    def first(self) -> tuple[RowPlace, RowPlace] | None:
        """Return both places of the first repeated id in input order; None if there is none."""
        return min((pair for part in self._parts() for pair in _twice(part)), key=lambda pair: pair[1], default=None)


def _twice(records: NDArray[np.void]) -> list[tuple[RowPlace, RowPlace]]:
    """At most one pair of places: the one whose second place comes first."""
    ordered = records[np.lexsort((records["row"], records["file"], records["hash"]))]
    at = np.flatnonzero(ordered["hash"][1:] == ordered["hash"][:-1])
    pairs = [(_place(ordered[index]), _place(ordered[index + 1])) for index in at.tolist()]
    return [min(pairs, key=lambda pair: pair[1])] if pairs else []


def _place(record: np.void) -> RowPlace:
    return int(record["file"]), int(record["row"])


class IdIndex(_Buckets):
    """Collects hashes of ids, and then tells which ids are among them. A context manager, since it owns a folder."""

    def __init__(self) -> None:
        super().__init__(_HASH)
        self._sorted: Hashes | None = None
        self.added = 0

    def add(self, hashes: Hashes) -> None:
        """Add hashes; not after the first look-up."""
        assert self._sorted is None, "ids are added before any is looked up"
        self.added += len(hashes)
        self._keep(hashes)

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Of each id whether it was added."""
        if not self.added:
            return np.zeros(len(ids), dtype=bool)
        if self._sorted is None:  # all distinct hashes in order; many are in a file that is mapped into memory
            parts = map(np.unique, self._parts())
            self._sorted = next(parts) if self._folder is None else self._write(self._folder / "sorted", parts)
        wanted = hashes_of(ids)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.asarray(self._sorted[at] == wanted)

    @staticmethod
    def _write(path: Path, parts: Iterable[Hashes]) -> Hashes:
        with path.open("wb") as file:
            for part in parts:
                part.tofile(file)
        return np.memmap(path, dtype=_HASH, mode="r")
