"""The Store interface: a few verbs over named bytes, and their types and errors.

Each verb's first sentence is its guarantee. Names are relative, with `/` between parts (`data/unit-00000017.parquet`).
Knows no particular store (local.py, s3.py, store.py) and nothing of what the bytes mean.

A new store needs a branch in `open_store`, its scheme in the PathMark of output.path (jobs/config/sections.py), and a parameter
of the fixture `store` (tests/storage/conftest.py), which holds it to every guarantee.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Final, Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class FileBody:
    """Data that is too large to be held in memory: an open temporary file of `size` bytes, read from its start."""

    file: IO[bytes]
    size: int

    def __len__(self) -> int:
        return self.size

    def chunks(self) -> Iterator[bytes]:
        """The data from the start, in chunks."""
        self.file.seek(0)
        while data := self.file.read(CHUNK_BYTES):
            yield data


CHUNK_BYTES = 2**20

Body = bytes | FileBody
"""What `create` and `replace` write."""


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

    def __hash__(self) -> int: ...

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """Return `length` bytes from `start`, fewer only at the object's end; NotFound if there is none.

        With `etag`, Conflict if the object is no longer that version.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield in the order of names the objects at the name `prefix` and below it, perhaps with others that begin so."""
        ...


class Store(ReadStore, Protocol):
    """Bytes by name, to read and write."""

    @property
    def place(self) -> Place:
        """The URL, and the S3 options that other places of a job share."""
        ...

    @property
    def url(self) -> str:
        """The store's URL as the user wrote it; never with credentials."""
        ...

    def get(self, name: str) -> bytes:
        """Return the whole object as some one writer left it, never a mixture; NotFound if there is none."""
        ...

    def create(self, name: str, data: Body, *, metadata: dict[str, str] | None = None) -> Stat:
        """The first writer wins: exactly one create of a name returns, all others raise AlreadyExists.

        When it returns, the object is whole, durable and visible. An answer lost on the way does not turn a success
        into AlreadyExists. Raises StoreRefused if the place can't be written at all.
        """
        ...

    def put(self, name: str, data: bytes) -> Stat:
        """The last writer wins, and readers see one whole version or the other."""
        ...

    def replace(self, name: str, data: Body, *, etag: str) -> Stat:
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
        """After it returns the name is free; deleting a missing object is no error."""
        ...


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


@runtime_checkable
class HasLevels(Protocol):
    """A store that can list one level by itself."""

    def level(self, folder: str) -> FolderLevel:
        """See `level_of`."""
        ...


def level_of(store: Store, folder: str = "") -> FolderLevel:
    """The level below `folder` (a name without a slash at its end; "" is the store itself). Nothing there is an empty level."""
    if isinstance(store, HasLevels):
        return store.level(folder)
    prefix = f"{folder}/" if folder else ""
    folders: dict[str, None] = {}
    files: dict[str, Stat] = {}
    for stat in store.list(prefix):
        name, slash, _ = stat.name.removeprefix(prefix).partition("/")
        if slash:
            folders[name] = None
        else:
            files[name] = stat
    return FolderLevel(tuple(folders), files)
