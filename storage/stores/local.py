"""A store in a local folder. Creation is a temporary file, fsync, and a hard link that fails if the name exists."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftmill.storage.errors import StoreError, StoreFull, StoreRefused, UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.stores.store import (
    AlreadyExists,
    Conflict,
    FolderLevel,
    NotFound,
    Place,
    Stat,
    Store,
    check_name,
)

_REFUSALS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
    | {errno.EISDIR, errno.ELOOP}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK})
TEMPORARY = ".tmp-"

STRAY_S = 3600.0
"""No live writer takes that many seconds for a file."""


class LocalStore(Store):
    """A folder as a store; made when first written. Durable: data and names are fsynced before a verb returns."""

    def __init__(self, path: str | os.PathLike[str], place: Place | None = None) -> None:
        self.url = os.fspath(path)
        self.place = place or Place(self.url)
        self.root = Path(path)
        self._made: list[Path] = []

    def get(self, name: str) -> bytes:
        with translate_errors(self._path(name)) as path:
            if path.is_dir():  # as on S3, where a folder is no object
                raise NotFound(f"{path} is a folder, not a file")
            return path.read_bytes()

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        with translate_errors(self._path(name)) as path, path.open("rb") as file:
            if etag is not None and _etag(os.fstat(file.fileno())) != etag:
                raise Conflict(f"{path} has changed")
            file.seek(start)
            return file.read(length)

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        """`metadata` is not kept."""
        path = self._path(name)
        with self._temporary(path, data) as temporary, translate_errors(path):
            failpoint("local.before_link")
            if not link_new(temporary, path):
                if path.is_dir():
                    raise IsADirectoryError
                raise AlreadyExists(self._stat(name, path))
            failpoint("local.after_link")
            sync_folder(path.parent)
            return self._stat(name, path)

    def put(self, name: str, data: bytes) -> Stat:
        path = self._path(name)
        with self._temporary(path, data) as temporary, translate_errors(path):
            failpoint("local.before_rename")
            os.replace(temporary, path)
            sync_folder(path.parent)
            return self._stat(name, path)

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        """Of the writers that replace one version, one gets the link that is named after it, and renames that link.

        So it needs no locks, which some file systems of clusters lack. If that writer is killed in between, the next one renames
        its link.
        """
        path = self._path(name)
        link = path.with_name(f"{TEMPORARY}{path.name}-{etag}")
        with suppress(NotFound), translate_errors(path):
            if _version(path) == etag:
                with self._temporary(path, data) as temporary:
                    is_ours = link_new(temporary, link)
                    if _version(path) == etag:
                        failpoint("local.before_rename")
                        with suppress(FileNotFoundError):  # another writer has renamed it
                            os.replace(link, path)
                    elif is_ours:
                        link.unlink(missing_ok=True)
                    sync_folder(path.parent)
                    # Another writer may have renamed our link, and replaced what is there since.
                    if is_ours and os.path.samefile(temporary, path):
                        return self._stat(name, temporary)
        raise Conflict(f"{path} has changed")

    def list(self, prefix: str = "") -> Iterator[Stat]:
        for name in self._names(prefix.rpartition("/")[0]):
            if name.startswith(prefix):
                with suppress(FileNotFoundError):  # deleted since the listing
                    yield self._stat(name, self.root / name)

    def level(self, folder: str = "") -> FolderLevel:
        folders, files = [], {}
        for name, entry in self._entries(folder):
            if entry.is_dir():
                folders.append(entry.name)
            else:
                with suppress(FileNotFoundError):
                    files[entry.name] = self._stat(name, self.root / name)
        return FolderLevel(tuple(folders), files)

    def exists(self, name: str) -> bool:
        with translate_errors(self._path(name)) as path:
            return path.is_file()

    def stat(self, name: str) -> Stat | None:
        with suppress(NotFound), translate_errors(self._path(name)) as path:
            return self._stat(name, path)
        return None

    def delete(self, name: str) -> None:
        with translate_errors(self._path(name)) as path:
            path.unlink(missing_ok=True)

    def delete_strays(self) -> None:
        """Delete the temporary files of killed writers; no live writer takes that many seconds for a file."""
        for folder, _, files in os.walk(self.root):
            for name in files:
                if name.startswith(TEMPORARY):
                    path = Path(folder, name)
                    with suppress(OSError):  # files that can't be deleted do no harm
                        if time.time() - path.stat().st_mtime > STRAY_S:
                            path.unlink()

    def tidy(self) -> None:
        """Remove the folders that this store made and that are empty again, including the root and its parents."""
        while self._made:
            with suppress(OSError):  # not empty
                self._made.pop().rmdir()

    def remove_empty_folders(self) -> None:
        """Remove every empty folder, the root last."""
        for folder, _, _ in os.walk(self.root, topdown=False):
            with suppress(OSError):  # not empty
                Path(folder).rmdir()

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _names(self, folder: str) -> Iterator[str]:
        for name, entry in self._entries(folder):
            if entry.is_dir():
                yield from self._names(name)
            else:
                yield name

    def _entries(self, folder: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
        """What is directly in a folder, but temporary files, in the order of names; nothing if there is no such folder."""
        place = self.root / folder
        with suppress(NotFound), translate_errors(place):
            # S3 sorts whole names, so a folder sorts with its slash.
            entries = sorted(os.scandir(place), key=lambda entry: f"{entry.name}/" if entry.is_dir() else entry.name)
            shown = (entry for entry in entries if not entry.name.startswith(TEMPORARY))
            return [(f"{folder}/{entry.name}" if folder else entry.name, entry) for entry in shown]
        return []

    def _stat(self, name: str, path: Path) -> Stat:
        stat = path.stat()
        return Stat(name, stat.st_size, _etag(stat), {}, stat.st_mtime)

    @contextmanager
    def _temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        """A synced temporary file with the data, in the folder of `path`; deleted afterwards unless renamed."""
        temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            with translate_errors(path):
                self._make_folder(path.parent)
                _write_synced(temporary, data)
            yield temporary
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
            self._made.append(folder)
        sync_folder(folder.parent)


def _etag(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"


def _version(path: Path) -> str:
    """The etag of a file; to open it makes a network file system ask the server again."""
    with path.open("rb") as file:
        return _etag(os.fstat(file.fileno()))


def link_new(temporary: Path, path: Path) -> bool:
    """Give the file its name; False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may do the work and lose the answer; a link count of two shows it.
        return temporary.stat().st_nlink > 1
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        reason = f"this file system can't link files ({error.strerror}); choose another place"
        raise StoreRefused(f"{path}: {reason}") from None
    return True


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def translate_errors(path: Path) -> Iterator[Path]:
    """Turn the system's errors into ours: NotFound, UserError or StoreRefused if the user must act, else StoreError."""
    try:
        yield path
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, and a file is needed there; move it away") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _REFUSALS:
            raise StoreRefused(f"{path}: {reason}") from None
        raise (StoreFull if error.errno in _FULL else StoreError)(f"{path}: {reason}") from None
