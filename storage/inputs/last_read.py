"""A cache of recently read table batches, so that neighbouring rows are read once and not once per unit.

The rows of a unit lie anywhere in their window, and the next unit has other rows of the same window. A reader that starts at the
front of a row group for each unit reads a large group hundreds of times. Nothing here knows files or formats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

KEPT_BYTES = 256 * 2**20
"""More than the texts of most windows have (jobs/packing.WINDOW_TOKENS)."""

Batches = Iterator[pa.RecordBatch]


@dataclass(slots=True)
class LastRead:
    """A table that is read from its front: its last batches, each with its first row, and the iterator of the next ones."""

    ahead: Batches
    kept: deque[tuple[int, pa.RecordBatch]] = field(default_factory=deque)
    end: int = 0
    num_bytes: int = 0

    @property
    def start(self) -> int:
        """The first row that is still cached."""
        return self.kept[0][0] if self.kept else self.end

    def advance(self) -> bool:
        """Read one more batch; False at the end."""
        batch = next(self.ahead, None)
        if batch is None:
            return False
        self.kept.append((self.end, batch))
        self.end += batch.num_rows
        self.num_bytes += batch.nbytes
        return True

    def drop(self) -> int:
        """Drop the oldest batch; returns its bytes."""
        _, batch = self.kept.popleft()
        self.num_bytes -= batch.nbytes
        return int(batch.nbytes)


class Stretches:
    """The most recently read stretches, `kept_bytes` in all and at least one batch."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._stretches: OrderedDict[Hashable, LastRead] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(stretch.num_bytes for stretch in self._stretches.values())

    def pick(
        self, table: Hashable, rows: Sequence[int], open_: Callable[[], Batches]
    ) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
        """Yield the wanted rows (sorted) with their numbers, batch by batch; rows beyond the end are skipped.

        `open_` gives the table's batches from its front. Its exceptions propagate, and the table is read again next time.
        """
        if not rows:
            return
        stretch = self._stretches.pop(table, None)
        if stretch is None or rows[0] < stretch.start:
            stretch = LastRead(open_())
        for start, batch in list(stretch.kept):
            yield from _inside(batch, start, rows)
        while rows[-1] >= stretch.end and stretch.advance():
            yield from _inside(stretch.kept[-1][1], stretch.kept[-1][0], rows)
            self._make_room(stretch)
        self._stretches[table] = stretch

    def _make_room(self, current: LastRead) -> None:
        """Drop the least recently used stretches, then the front of the one that is being read."""
        total = current.num_bytes + self.num_bytes
        while total > self._kept_bytes and self._stretches:
            total -= self._stretches.popitem(last=False)[1].num_bytes
        while total > self._kept_bytes and len(current.kept) > 1:
            total -= current.drop()


def _inside(batch: pa.RecordBatch, start: int, rows: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
    inside = rows[bisect_left(rows, start) : bisect_left(rows, start + batch.num_rows)]
    if inside:
        yield batch.take(pa.array([row - start for row in inside])), inside
