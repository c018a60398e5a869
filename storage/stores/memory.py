"""A store in memory, for tests and dry runs."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from threading import Lock
from typing import ClassVar

from draftmill.storage.stores.interface import AlreadyExists, Body, Conflict, NotFound, Stat, checked_name


class MemoryStore:
    """A store in this process's memory; stores of one name share their objects. For tests and dry runs."""

    _places: ClassVar[dict[str, dict[str, tuple[bytes, Stat]]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._objects = self._places.setdefault(name, {})

    def get(self, name: str) -> bytes:
        """See Store."""
        with self._lock:
            if name not in self._objects:
                raise NotFound(f"{self.url}/{name} does not exist")
            return self._objects[name][0]

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """See Store."""
        found = self.stat(name)
        if etag is not None and found is not None and found.etag != etag:
            raise Conflict(f"{self.url}/{name} has changed")
        return self.get(name)[start : start + length]

    def create(self, name: str, data: Body, *, metadata: dict[str, str] | None = None) -> Stat:
        """See Store."""
        with self._lock:
            if name in self._objects:
                raise AlreadyExists(self._objects[name][1])
            return self._set(name, data, metadata)

    def put(self, name: str, data: bytes) -> Stat:
        """See Store."""
        with self._lock:
            return self._set(name, data, None)

    def replace(self, name: str, data: Body, *, etag: str) -> Stat:
        """See Store."""
        with self._lock:
            if name not in self._objects or self._objects[name][1].etag != etag:
                raise Conflict(f"{self.url}/{name} has changed")
            return self._set(name, data, None)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """See Store."""
        with self._lock:
            found = [stat for name, (_, stat) in sorted(self._objects.items()) if name.startswith(prefix)]
        return iter(found)

    def exists(self, name: str) -> bool:
        """See Store."""
        return self.stat(name) is not None

    def stat(self, name: str) -> Stat | None:
        """See Store."""
        with self._lock:
            return self._objects[name][1] if name in self._objects else None

    def delete(self, name: str) -> None:
        """See Store."""
        with self._lock:
            self._objects.pop(name, None)

    def _set(self, name: str, body: Body, metadata: dict[str, str] | None) -> Stat:
        data = body if isinstance(body, bytes) else b"".join(body.chunks())
        # A random part distinguishes two writes of equal bytes, like a version.
        etag = f"{hashlib.sha256(data).hexdigest()[:16]}-{secrets.token_hex(4)}"
        stat = Stat(checked_name(name), len(data), etag, dict(metadata or {}))
        self._objects[name] = (bytes(data), stat)
        return stat
