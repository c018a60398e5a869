"""A few verbs over a place where bytes live: local disk, memory, or S3. Each verb's first sentence is its guarantee.

Names are relative, with `/` between parts (`data/unit-00000017.parquet`). Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar, Protocol

from storage.errors import StoreError, UserError


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store knows of one object without reading it.

    `size` is in bytes, `mtime_s` is Unix time. `etag` changes when the content does. `metadata` is what `create` was
    given, where the store keeps it (S3 and memory; not local disk) and the verb had it at hand (not `list`).
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


class AlreadyExists(StoreError):
    """The name is taken; `stat` says by what. For a writer that finds its own work, this means done."""

    def __init__(self, stat: Stat) -> None:
        super().__init__(stat)
        self.stat = stat

    def __str__(self) -> str:
        return f"{self.stat.name} exists already ({self.stat.size} bytes)"


class NotFound(StoreError):
    """There is no object of that name."""


class Conflict(StoreError):
    """The object is not, or is no longer, the version that was to be replaced."""


class Store(Protocol):
    """Bytes by name. Failures that may pass are retried inside; what is raised is a StoreError."""

    @property
    def url(self) -> str:
        """Where this is, as the user wrote it; never with credentials."""
        ...

    def __hash__(self) -> int: ...

    def get(self, name: str) -> bytes:
        """Return the whole object as some one writer left it, never a mixture; NotFound if there is none."""
        ...

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer only at the object's end; NotFound if there is none."""
        ...

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        """The first writer wins: exactly one create of a name returns, all others raise AlreadyExists.

        When it returns, the object is whole, durable and visible. An answer lost on the way does not turn a success
        into AlreadyExists. Raises UserError if the place can't be written at all.
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
        ...

    def stat(self, name: str) -> Stat | None:
        """Return size, etag and metadata of an object, None if there is none."""
        ...

    def delete(self, name: str) -> None:
        """After it returns the name is free; deleting what is not there is no error."""
        ...


def open_store(url: str, *, s3: S3Options | None = None) -> Store:
    """Return the store at a local path, `memory://NAME` (this process only) or `s3://bucket/prefix`.

    Nothing is contacted or created yet. Raises UserError for a URL of another kind.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        from storage.local import LocalStore

        return LocalStore(url)
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme == "s3":
        from storage.s3 import S3Store

        return S3Store(url, s3 or S3Options())
    raise UserError(f"{url!r} is not a place to store: use a local path, s3://bucket/prefix or memory://NAME")


def probe(store: Store) -> bool:
    """True if the store honours conditional creation: of two creates of one name, the second is refused.

    Leaves nothing behind. Raises UserError if the store can't be reached or written.
    """
    name = f"_probe-{secrets.token_hex(8)}"
    try:
        store.create(name, b"first")
    except UserError as error:
        raise UserError(error.message, field=error.field or "output.path") from None
    except StoreError as error:
        raise UserError(str(error), field="output.path") from None
    try:
        store.create(name, b"second")
    except AlreadyExists:
        return True
    finally:
        store.delete(name)
    return False


def checked_name(name: str) -> str:
    """Return `name` if it stays inside its store; ValueError for absolute names, `..`, and separators of other kinds."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{name!r} is not a name inside a store")
    return name


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

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See Store."""
        return self.get(name)[start : start + length]

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        """See Store."""
        with self._lock:
            if name in self._objects:
                raise AlreadyExists(self._objects[name][1])
            return self._set(name, data, metadata)

    def put(self, name: str, data: bytes) -> Stat:
        """See Store."""
        with self._lock:
            return self._set(name, data, None)

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
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

    def _set(self, name: str, data: bytes, metadata: dict[str, str] | None) -> Stat:
        # A random part keeps two writes of equal bytes apart, as a version does.
        etag = f"{hashlib.sha256(data).hexdigest()[:16]}-{secrets.token_hex(4)}"
        stat = Stat(checked_name(name), len(data), etag, dict(metadata or {}))
        self._objects[name] = (bytes(data), stat)
        return stat
