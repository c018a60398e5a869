"""The Store interface: a few verbs over named bytes, their types and errors; how a store is opened; the store in memory.

Each verb's first sentence is its guarantee. Names are relative, with `/` between parts (`data/unit-00000017.parquet`).
Knows nothing of what the bytes mean. Stores on disks and buckets are in local.py and s3.py.

A new store needs a branch in `open_store`, its scheme in the PathMark of output.path (jobs/config/sections.py), and a parameter
of the fixture `store` (tests/storage/conftest.py), which holds it to every guarantee.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar, Final, Protocol

from draftmill.storage.errors import ChangedInput, StoreError, StoreFull, StoreRefused, UserError


@dataclass(frozen=True, slots=True)
class Stat:
    """The facts about one object that need no read of its content.

    `size` is the number of bytes that `get` returns, `mtime_s` is Unix time. `etag` changes when the content does. `metadata` is
    what `create` was given, if the store keeps it (S3 and memory; not local disk) and the verb returns it (not `list`).
    """

    name: str
    size: int
    etag: str
    metadata: dict[str, str] = field(default_factory=dict)
    mtime_s: float | None = None


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach S3: the `s3:` section of a spec. Credentials come from the environment as boto3 finds them.

    `addressing`: auto (path style where an endpoint is named), path, or virtual. `checksums`: auto (SHA-256 with every
    write, nothing else), when_required (none: for vendors that refuse the headers), or when_supported (boto3's own).
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    checksums: str = "auto"


S3_DEFAULTS: Final = S3Options()


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is: a local path or a URL, and how to reach S3 if it is there."""

    url: str
    s3: S3Options = S3_DEFAULTS

    def at(self, url: str) -> Place:
        """Another place that is reached in the same way."""
        return Place(url, self.s3)

    def below(self, name: str) -> Place:
        """A name inside this folder."""
        return self.at(f"{self.url.rstrip('/')}/{name}")


MOST_ETAG: Final = 48
"""Characters of an etag, at most: those of local disk have up to 42, those of S3 mostly 32."""


def is_short_etag(etag: str) -> bool:
    """Whether an etag is ASCII text of at most MOST_ETAG characters, as all facts of units need it."""
    return etag.isascii() and len(etag) <= MOST_ETAG and not etag.endswith("\0")


def is_local(place: str) -> bool:
    """Whether a place is a path on a local disk, as all places without a scheme (`s3://`, `memory://`, `hf://`)."""
    return "://" not in place


class AlreadyExists(StoreError):
    """The name is taken by the object in `stat`. For a writer that finds its own work, this means done."""

    def __init__(self, stat: Stat) -> None:
        super().__init__(stat)
        self.stat = stat

    def __str__(self) -> str:
        return f"{self.stat.name} exists already ({self.stat.size} bytes)"


class NotFound(StoreError):
    """There is no object of that name."""


class Conflict(StoreError):
    """The object is not, or is no longer, the version that was to be replaced or read."""


@contextmanager
def about(field: str) -> Iterator[None]:
    """In the block, a store's errors begin with the spec's key that names the place.

    What is missing is a UserError, and another version than the one that was asked for is a ChangedInput.
    """
    try:
        yield
    except NotFound as error:
        raise UserError(str(error), field=field) from None
    except Conflict as error:
        raise ChangedInput(f"{field}: {error}") from None
    except (StoreRefused, StoreFull) as error:
        raise type(error)(f"{field}: {error}") from None
    except StoreError as error:
        raise StoreError(f"{field}: {error}") from None


class ReadStore(Protocol):
    """Bytes by name, to read. Temporary failures are retried inside; what stays is a StoreError, a refusal StoreRefused."""

    def __hash__(self) -> int:
        return object.__hash__(self)

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """Return `length` bytes from `start`, fewer only at the object's end; NotFound if there is none.

        With `etag`, Conflict if the object is no longer that version.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield in the order of names the objects at the name `prefix` and below it, perhaps with others that begin so."""
        ...


class Store(ReadStore, Protocol):
    """Bytes by name, to read and write; stores inherit the verbs at the end unless they can do better."""

    place: Place
    """The URL, and the S3 options that other places of a job share."""
    url: str
    """The store's URL as the user wrote it; never with credentials."""

    def get(self, name: str) -> bytes:
        """Return the whole object as some one writer left it, never a mixture; NotFound if there is none."""
        ...

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        """The first writer wins: exactly one create of a name returns, all others raise AlreadyExists.

        When it returns, the object is whole, durable and visible. An answer lost on the way does not turn a success
        into AlreadyExists. Raises StoreRefused if the place can't be written at all.
        """
        ...

    def put(self, name: str, data: bytes) -> Stat:
        """The last writer wins, and readers see one whole version or the other."""
        ...

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        """Write only if the object is still the version `etag`; otherwise Conflict, and nothing has changed."""
        ...

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield every finished object whose name starts with `prefix`, in the order of names."""
        ...

    def exists(self, name: str) -> bool:
        """True if a finished object has that name."""
        return self.stat(name) is not None

    def stat(self, name: str) -> Stat | None:
        """Return size, etag and metadata of an object, None if there is none."""
        ...

    def delete(self, name: str) -> None:
        """After it returns the name is free; deleting a missing object is no error."""
        ...

    def level(self, folder: str = "") -> FolderLevel:
        """The level below `folder` (without a slash at its end; "" is the store itself). Nothing there is an empty level."""
        prefix = f"{folder}/" if folder else ""
        folders: dict[str, None] = {}
        files: dict[str, Stat] = {}
        for stat in self.list(prefix):
            name, slash, _ = stat.name.removeprefix(prefix).partition("/")
            if slash:
                folders[name] = None
            else:
                files[name] = stat
        return FolderLevel(tuple(folders), files)

    def delete_strays(self) -> None:
        """Delete half-written files of killed writers; only a local folder has any. Objects on S3 are whole or absent, and runs
        start no multipart uploads (exports do, and clean up their own: storage/stores/upload.py).
        """
        return

    def tidy(self) -> None:
        """Remove the folders that this store made and that are empty again; only a local store has any."""
        return

    def remove_empty_folders(self) -> None:
        """Remove every empty folder, and the store's own if that is empty; only a local store has folders."""
        return


def check_name(name: str) -> str:
    """Return `name` if it stays inside its store; ValueError for absolute names, `..`, and separators of other kinds."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{name!r} is not a name inside a store")
    return name


@dataclass(frozen=True, slots=True)
class FolderLevel:
    """What is directly below a folder: names of folders, and objects by their last name. A Stat has its whole name."""

    folders: tuple[str, ...]
    files: dict[str, Stat]


class MemoryStore(Store):
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

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        with self._lock:
            if name in self._objects:
                raise AlreadyExists(self._objects[name][1])
            return self._set(name, data, metadata)

    def put(self, name: str, data: bytes) -> Stat:
        with self._lock:
            return self._set(name, data, None)

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        with self._lock:
            if name not in self._objects or self._objects[name][1].etag != etag:
                raise Conflict(f"{self.url}/{name} has changed")
            return self._set(name, data, None)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        with self._lock:
            return iter([stat for name, (_, stat) in sorted(self._objects.items()) if name.startswith(prefix)])

    def stat(self, name: str) -> Stat | None:
        with self._lock:
            return self._objects[name][1] if name in self._objects else None

    def delete(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)

    def _set(self, name: str, data: bytes, metadata: dict[str, str] | None) -> Stat:
        # A random part distinguishes two writes of equal bytes, like a version.
        etag = f"{hashlib.sha256(data).hexdigest()[:16]}-{secrets.token_hex(4)}"
        stat = Stat(check_name(name), len(data), etag, dict(metadata or {}))
        self._objects[name] = (data, stat)
        return stat


def open_store(place: Place | str) -> Store:
    """Return the store at a local path, `memory://NAME` (this process only) or `s3://bucket/prefix`.

    Nothing is contacted or created yet. Raises UserError for a URL of another kind.
    """
    place = Place(place) if isinstance(place, str) else place
    scheme, separator, rest = (url := place.url).partition("://")
    if url and not separator:
        if os.path.isfile(path := os.path.expanduser(url)):
            raise UserError(f"{url!r} is a file; allowed: a folder")
        from draftmill.storage.stores.local import LocalStore

        return LocalStore(path, place)
    if scheme == "memory":
        return MemoryStore(rest, place)
    if scheme == "s3":
        # Importing boto3 takes a third of a second, which a job on local disk can save.
        from draftmill.storage.stores.s3 import S3Store

        return S3Store(url, place.s3)
    raise UserError(f"{url!r} is not a place to store: use a local path, s3://bucket/prefix or memory://NAME")


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
