"""Lines in a store that can't append: a series of files, the last of which is rewritten until it is full."""

from __future__ import annotations

from draftmill.storage.stores.verbs import Store

LINES_PER_FILE = 2000


class LineFiles:
    """Lines to be written to PREFIX-part-0000.jsonl and so on."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._part = 0
        self._lines: list[str] = []
        self._dirty = False

    def add(self, line: str) -> None:
        """Add a line, from any thread; `flush`, which one thread calls, writes it."""
        self._lines.append(line)
        self._dirty = True

    def flush(self) -> None:
        """Write the new lines; raises StoreError if the store can't be written, and keeps the lines."""
        if not self._dirty:
            return
        lines, self._dirty = self._lines[:], False  # other threads may add lines meanwhile
        try:
            self._store.put(f"{self._prefix}-part-{self._part:04d}.jsonl", ("\n".join(lines) + "\n").encode())
        except BaseException:
            self._dirty = True
            raise
        if len(lines) >= LINES_PER_FILE:
            self._part += 1
            del self._lines[: len(lines)]
