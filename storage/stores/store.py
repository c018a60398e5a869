"""Opens a store by its URL, and probes whether it honours conditional writes."""

from __future__ import annotations

import os
import secrets

from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import AlreadyExists, S3Options, Store, about
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.memory import MemoryStore


def open_store(url: str, *, s3: S3Options | None = None) -> Store:
    """Return the store at a local path, `memory://NAME` (this process only) or `s3://bucket/prefix`.

    Nothing is contacted or created yet. Raises UserError for a URL of another kind.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if os.path.isfile(place := os.path.expanduser(url)):
            raise UserError(f"{url!r} is a file; allowed: a folder")
        return LocalStore(place)
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme == "s3":
        # Importing boto3 takes a third of a second, which a job on local disk can save.
        from draftmill.storage.stores.s3 import S3Store

        return S3Store(url, s3 or S3Options())
    raise UserError(f"{url!r} is not a place to store: use a local path, s3://bucket/prefix or memory://NAME")


def sweep(store: Store) -> None:
    """Delete half-written files of killed writers. Only a local folder can have any: objects on S3 are whole or absent, and
    runs start no multipart uploads (exports do, and clean up their own: storage/stores/upload.py).
    """
    if isinstance(store, LocalStore):
        store.sweep()


def tidy(store: Store) -> None:
    """Remove the folders that `store` made and that are empty again; only a local store has any."""
    if isinstance(store, LocalStore):
        store.tidy()


def remove_empty_folders(store: Store) -> None:
    """Remove every empty folder in a store, and its own if that is empty; only a local store has folders."""
    if isinstance(store, LocalStore):
        store.remove_empty_folders()


def probe(store: Store) -> bool:
    """True if the store honours conditional creation: of two creates of one name, the second is refused.

    Leaves nothing behind. Raises StoreRefused if the store can't be written, another StoreError if it can't be reached.
    """
    name = f"_probe-{secrets.token_hex(8)}"
    with about("output.path"):
        store.create(name, b"first")
        try:
            store.create(name, b"second")
        except AlreadyExists:
            return True
        finally:
            store.delete(name)
    return False
