"""Opens stores by URL; the store in memory. Probes whether a store honours conditional writes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import ClassVar

from draftmill.storage.errors import StoreRefused, UserError
from draftmill.storage.stores.interface import (
    AlreadyExists,
    Body,
    Conflict,
    NotFound,
    Place,
    Stat,
    Store,
    about,
    check_name,
    is_short_etag,
)
from draftmill.storage.stores.local import LocalStore


class MemoryStore:
    """A store in this process's memory; stores of one name share their objects. For tests and dry runs."""

    _places: ClassVar[dict[str, dict[str, tuple[bytes, Stat]]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, name: str, place: Place | None = None) -> None:
        self.url = f"memory://{name}"
        self.place = place or Place(self.url)
        self._objects = self._places.setdefault(name, {})

    def get(self, name: str) -> bytes:
        with self._lock:
            if name not in self._objects:
                raise NotFound(f"{self.url}/{name} does not exist")
            return self._objects[name][0]

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        stat = self.stat(name)
        if etag is not None and stat is not None and stat.etag != etag:
            raise Conflict(f"{self.url}/{name} has changed")
        return self.get(name)[start : start + length]

    def create(self, name: str, data: Body, *, metadata: dict[str, str] | None = None) -> Stat:
        with self._lock:
            if name in self._objects:
                raise AlreadyExists(self._objects[name][1])
            return self._set(name, data, metadata)

    def put(self, name: str, data: bytes) -> Stat:
        with self._lock:
            return self._set(name, data, None)

    def replace(self, name: str, data: Body, *, etag: str) -> Stat:
        with self._lock:
            if name not in self._objects or self._objects[name][1].etag != etag:
                raise Conflict(f"{self.url}/{name} has changed")
            return self._set(name, data, None)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        with self._lock:
            return iter([stat for name, (_, stat) in sorted(self._objects.items()) if name.startswith(prefix)])

    def exists(self, name: str) -> bool:
        return self.stat(name) is not None

    def stat(self, name: str) -> Stat | None:
        with self._lock:
            return self._objects[name][1] if name in self._objects else None

    def delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)

    def _set(self, name: str, body: Body, metadata: dict[str, str] | None) -> Stat:
        data = body if isinstance(body, bytes) else b"".join(body.chunks())
        # A random part distinguishes two writes of equal bytes, like a version.
        etag = f"{hashlib.sha256(data).hexdigest()[:16]}-{secrets.token_hex(4)}"
        stat = Stat(check_name(name), len(data), etag, dict(metadata or {}))
        self._objects[name] = (bytes(data), stat)
        return stat


def open_store(place: Place | str) -> Store:
    """Return the store at a local path, `memory://NAME` (this process only) or `s3://bucket/prefix`.

    Nothing is contacted or created yet. Raises UserError for a URL of another kind.
    """
    place = Place(place) if isinstance(place, str) else place
    scheme, separator, rest = (url := place.url).partition("://")
    if not separator:
        if os.path.isfile(path := os.path.expanduser(url)):
            raise UserError(f"{url!r} is a file; allowed: a folder")
        return LocalStore(path, place)
    if scheme == "memory":
        return MemoryStore(rest, place)
    if scheme == "s3":
        # Importing boto3 takes a third of a second, which a job on local disk can save.
        from draftmill.storage.stores.s3 import S3Store

        return S3Store(url, place.s3)
    raise UserError(f"{url!r} is not a place to store: use a local path, s3://bucket/prefix or memory://NAME")


def delete_strays(store: Store) -> None:
    """Delete half-written files of killed writers; only a local folder has any. Objects on S3 are whole or absent, and runs start
    no multipart uploads (exports do, and clean up their own: storage/stores/upload.py).
    """
    if isinstance(store, LocalStore):
        store.delete_strays()


def tidy(store: Store) -> None:
    """Remove the folders that `store` made and that are empty again; only a local store has any."""
    if isinstance(store, LocalStore):
        store.tidy()


def remove_empty_folders(store: Store) -> None:
    """Remove every empty folder in a store, and its own if that is empty; only a local store has folders."""
    if isinstance(store, LocalStore):
        store.remove_empty_folders()


def probe(store: Store) -> None:
    """Raise StoreRefused if the store can't be written or ignores conditions: then two writers could both win.

    It needs `create` to refuse a taken name, and `replace` another version than the current one. Leaves nothing behind.
    Raises another StoreError if the store can't be reached, or is full.
    """
    name = f"_probe-{secrets.token_hex(8)}"
    with about("output.path"):
        first = store.create(name, b"first")
        try:
            if not is_short_etag(store.replace(name, b"second", etag=first.etag).etag):
                raise StoreRefused(f"{store.url}: etags of this store are too long, or not ASCII: {first.etag!r}")
            for write in (lambda: store.create(name, b"third"), lambda: store.replace(name, b"4th", etag=first.etag)):
                with suppress(AlreadyExists, Conflict):
                    write()
                    raise StoreRefused(
                        f"{store.url}: this store ignores conditional writes (If-None-Match, If-Match), so that two writers "
                        "may overwrite each other; use a store that honours them (Amazon S3, Ceph, MinIO), or a folder"
                    )
        finally:
            store.delete(name)
