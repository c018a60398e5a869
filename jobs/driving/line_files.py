"""Lines in a store that can't append: a series of files, the last of which is rewritten until it is full."""

from __future__ import annotations

from draftmill.storage.stores.interface import Store

LINES_PER_FILE = 2000


class LineFiles:
    """Lines to be written to PREFIX-part-0000.jsonl and so on."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._part = 0
        self._lines: list[str] = []
        self._written = 0
        """How many of the lines the last file has: other threads may add lines at any time, so no flag could tell."""

    def add(self, line: str) -> None:
        """Add a line, from any thread; `flush`, which one thread calls, writes it."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write the new lines; raises StoreError if the store can't be written, and keeps the lines."""
        lines = self._lines[:]
        if len(lines) == self._written:
            return
        self._store.put(f"{self._prefix}-part-{self._part:04d}.jsonl", ("\n".join(lines) + "\n").encode())
        self._written = len(lines)
        if self._written >= LINES_PER_FILE:
            self._part += 1
            del self._lines[: self._written]
            self._written = 0
