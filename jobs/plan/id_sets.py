"""Sets of ids of any size, in constant memory: finds an id that occurs twice, and tells which ids are among known ones.

Ids are hashed to 128 bits. The hashes are partitioned by their first byte into files of a temporary folder, so that equal ids are
in the same file, and one file at a time is sorted in memory. Among a billion ids two have the same hash with a probability below
1e-20.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

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
    """The hashes of ids."""
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


class _Folder(tempfile.TemporaryDirectory[str]):
    """A temporary folder with a file for each first byte of a hash."""

    def __init__(self) -> None:
        super().__init__(prefix="draftmill-ids-")
        self.path = Path(self.name)

    def add(self, hashes: Hashes, records: NDArray[np.void] | Hashes) -> None:
        """Append records, one for each hash, to the files."""
        first = np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, HASH_BYTES)[:, 0]
        order = np.argsort(first, kind="stable")
        edges = np.searchsorted(first[order], np.arange(257))
        for byte, (start, end) in enumerate(pairwise(edges.tolist())):
            if start < end:
                with (self.path / f"{byte:02x}").open("ab") as file:
                    file.write(records[order[start:end]].tobytes())

    def files(self) -> list[Path]:
        return sorted(self.path.glob("[0-9a-f][0-9a-f]"))


class DuplicateFinder(ExitStack):
    """Collects every id with its place; `first` then returns a duplicate. A context manager, since it may own a folder."""

    def __init__(self, *, held_rows: int = HELD_ROWS) -> None:
        super().__init__()
        self._held_rows = held_rows
        self._held: list[NDArray[np.void]] = []
        self._count = 0
        self._folder: _Folder | None = None

    def add(self, hashes: Hashes, files: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Add a batch: three arrays of equal length."""
        records = np.empty(len(rows), dtype=_RECORD)
        records["hash"], records["file"], records["row"] = hashes, files, rows
        self._held.append(records)
        self._count += len(records)
        if self._count >= self._held_rows:
            if self._folder is None:
                self._folder = _Folder()
                self.enter_context(self._folder)
            self._spread(self._folder)

    def first(self) -> tuple[RowPlace, RowPlace] | None:
        """Return both places of the first repeated id in input order; None if there is none."""
        return min((pair for part in self._parts() for pair in _twice(part)), key=lambda pair: pair[1], default=None)

    def _parts(self) -> Iterator[NDArray[np.void]]:
        if self._folder is not None:
            self._spread(self._folder)
            yield from (np.fromfile(path, dtype=_RECORD) for path in self._folder.files())
        elif self._held:
            yield np.concatenate(self._held)

    def _spread(self, folder: _Folder) -> None:
        records = np.concatenate([np.empty(0, dtype=_RECORD), *self._held])
        folder.add(records["hash"], records)
        self._held, self._count = [], 0


def _twice(records: NDArray[np.void]) -> list[tuple[RowPlace, RowPlace]]:
    """At most one pair of places: the one whose second place comes first."""
    ordered = records[np.lexsort((records["row"], records["file"], records["hash"]))]
    at = np.flatnonzero(ordered["hash"][1:] == ordered["hash"][:-1])
    pairs = [(_place(ordered[index]), _place(ordered[index + 1])) for index in at.tolist()]
    return [min(pairs, key=lambda pair: pair[1])] if pairs else []


def _place(record: np.void) -> RowPlace:
    return int(record["file"]), int(record["row"])


class IdIndex(ExitStack):
    """Collects hashes of ids, and then tells which ids are among them. A context manager, since it owns a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = _Folder()
        self.enter_context(self._folder)
        self._sorted: Hashes | None = None
        self.added = 0

    def add(self, hashes: Hashes) -> None:
        """Add hashes; not after the first look-up."""
        assert self._sorted is None, "ids are added before any is looked up"
        self.added += len(hashes)
        self._folder.add(hashes, hashes)

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Of each id whether it was added."""
        if not self.added:
            return np.zeros(len(ids), dtype=bool)
        if self._sorted is None:
            self._sorted = self._sort()
        wanted = hashes_of(ids)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.asarray(self._sorted[at] == wanted)

    def _sort(self) -> Hashes:
        """All distinct hashes in order, in a file that is mapped into memory; sorts a part at a time."""
        with (self._folder.path / "sorted").open("wb") as file:
            for path in self._folder.files():
                np.unique(np.fromfile(path, dtype=_HASH)).tofile(file)
                path.unlink()
        return np.memmap(self._folder.path / "sorted", dtype=_HASH, mode="r")
