"""Finds an id that occurs twice among any number of rows, in constant memory.

Ids are hashed to 128 bits and partitioned by one byte of the hash into files of a temporary folder, so equal ids are in the
same file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.actors.rows.row import id_hashes

HELD_ROWS = 2**18
"""Rows kept in memory before they are written to the files."""

Place = tuple[int, int]
"""(file, row)"""

_BUCKETS = 256
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("file", "<i4"), ("row", "<i8")])


class DuplicateFinder:
    """Collects every id with its place; `first` then returns a duplicate. A context manager, since it owns a folder."""

    def __init__(self, *, held_rows: int = HELD_ROWS) -> None:
        self._held_rows = held_rows
        self._held: list[NDArray[np.void]] = []
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> DuplicateFinder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, ids: Sequence[str], files: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Add a batch: three sequences of equal length."""
        self.add_hashes(id_hashes(ids), files, rows)

    def add_hashes(self, data: bytes | pa.Buffer, files: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Add a batch whose ids are hashed already (draftmill.actors.rows.row): 16 bytes for each row."""
        records = np.empty(len(rows), dtype=_RECORD)
        hashes = np.frombuffer(data, dtype="<u8", count=2 * len(rows)).reshape(-1, 2)
        records["high"], records["low"], records["file"], records["row"] = hashes[:, 0], hashes[:, 1], files, rows
        self._held.append(records)
        self._count += len(records)
        if self._count >= self._held_rows:
            self._spread()

    def first(self) -> tuple[Place, Place] | None:
        """Return both places of the first repeated id in input order; None if there is none."""
        found = [pair for records in self._buckets() for pair in _twice(records)]
        return min(found, key=lambda pair: pair[1]) if found else None

    def _buckets(self) -> Iterator[NDArray[np.void]]:
        if self._folder is None:
            if self._held:
                yield np.concatenate(self._held)
            return
        self._spread()
        for path in sorted(Path(self._folder.name).iterdir()):
            yield np.fromfile(path, dtype=_RECORD)

    def _spread(self) -> None:
        if not self._held:
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="draftmill-ids-")
        records = np.concatenate(self._held)
        bucket = (records["high"] % _BUCKETS).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        edges = np.searchsorted(bucket[order], np.arange(_BUCKETS + 1))
        for number, (start, end) in enumerate(pairwise(edges.tolist())):
            if start < end:
                with Path(self._folder.name, f"{number:03d}").open("ab") as file:
                    file.write(records[order[start:end]].tobytes())
        self._held, self._count = [], 0


def _twice(records: NDArray[np.void]) -> list[tuple[Place, Place]]:
    """At most one pair of places: the one whose second place comes first."""
    ordered = records[np.lexsort((records["row"], records["file"], records["low"], records["high"]))]
    same = (ordered["high"][1:] == ordered["high"][:-1]) & (ordered["low"][1:] == ordered["low"][:-1])
    at = np.flatnonzero(same)
    pairs = [(_place(ordered[index]), _place(ordered[index + 1])) for index in at.tolist()]
    return [min(pairs, key=lambda pair: pair[1])] if pairs else []


def _place(record: np.void) -> Place:
    return int(record["file"]), int(record["row"])
