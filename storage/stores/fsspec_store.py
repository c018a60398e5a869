"""A bucket of another cloud, by fsspec's drivers: gcsfs for gs://, adlfs for az:// and abfs://. Inputs are read from it, and
datasets published to it; a run needs writes with a condition, which drivers don't have.

Nor have they reads with one, as S3's If-Match. So the object's version is compared after each read. A version that was
replaced never comes back: an object that is the planned version after a read was so during the read.

A new scheme needs an entry in DRIVERS, once it is known which of the driver's facts changes with every write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.secrets import presentable
from draftmill.storage.stores.store import Conflict, NotFound, Stat

DRIVERS: Final = {"gs": ("gcsfs", "generation"), "az": ("adlfs", "etag"), "abfs": ("adlfs", "etag")}
"""By scheme, the driver's package, and the fact about an object that identifies its version."""

HUB: Final = {"hf": ("huggingface_hub", "blob_id")}
"""The hub's driver, which hub.py alone uses: an input at hf:// is read by the library `datasets`."""

UNSEEN: Final = "; elsewhere an object that changes would not be noticed"
"""Why no other schemes are allowed."""


class FsspecStore:
    """A bucket, or a container, as a ReadStore. Drivers retry by themselves, and find credentials in the environment.
    Objects are written by one export at a time, each at once."""

    def __init__(self, url: str) -> None:
        import fsspec  # it takes a tenth of a second

        scheme, _, self._bucket = url.partition("://")
        if not self._bucket:
            raise StoreRefused(f"{url!r} names no bucket: {scheme}://bucket/path")
        self.url, (package, self._version) = url, (DRIVERS | HUB)[scheme]
        with self._errors(""):
            try:  # a cached listing would hide changes
                self._files = fsspec.filesystem(scheme, use_listings_cache=False)
            except ImportError:
                raise StoreRefused(f"{url} needs a package that is not installed: pip install {package}") from None

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """gcsfs asks for this very version: a cache of Google's may still answer with the one before."""
        version = {"generation": etag} if etag and self._version == "generation" else {}
        with self._errors(name):
            try:
                data = bytes(self._files.cat_file(self._path(name), start, start + length, **version))
            except Exception:
                self._check(name, etag)  # the version is gone, or the new one ends before the range
                raise
            size = self._check(name, etag).size
        if len(data) != max(0, min(length, size - start)):
            problem = f"{len(data):,} bytes came from {start:,} on, of {size:,}; a Content-Encoding is not supported"
            raise StoreError(f"{self.url}/{name}: {problem}")
        return data

    def _check(self, name: str, etag: str | None) -> Stat:
        stat = self._stat(self._files.info(self._path(name)))
        if etag not in {None, stat.etag}:
            raise Conflict(f"{self.url}/{name} has changed since it was listed")
        return stat

    def put(self, name: str, data: bytes) -> None:
        """Write an object, unless it is there as it should be."""
        with self._errors(name):
            there = next((stat for stat in self.list(name) if stat.name == name), None)
            if there is None or there.size != len(data) or (data and self._files.cat_file(self._path(name)) != data):
                self._files.pipe_file(self._path(name), data)

    def delete(self, name: str) -> None:
        with self._errors(name):
            self._files.rm_file(self._path(name))

    def list(self, prefix: str = "") -> Iterator[Stat]:
        with self._errors(prefix):
            try:
                found = self._files.info(self._path(prefix))
            except FileNotFoundError:
                return
            is_folder = found["type"] == "directory"
            infos = self._files.find(self._path(prefix), detail=True).values() if is_folder else [found]
            stats = [self._stat(info) for info in infos if info["type"] == "file"]
        yield from sorted(stats, key=lambda stat: stat.name)

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{name}".rstrip("/")

    def _stat(self, info: dict[str, Any]) -> Stat:
        name = info["name"].removeprefix(f"{self._bucket}/")
        if not (version := info.get(self._version)):
            problem = f"its driver gives no {self._version}, without which a change of the object would not be noticed"
            raise StoreRefused(f"{self.url}/{name}: {problem}")
        return Stat(name, info["size"], str(version).strip('"'))

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise NotFound(f"{where} does not exist") from None
        except Exception as error:  # noqa: BLE001 - the drivers' errors have no common class
            # The hub's error of an upload names no reason; its cause does.
            why = error.__cause__ or error if isinstance(error, RuntimeError) else error
            status = getattr(getattr(why, "response", None), "status_code", None)
            kind = StoreRefused if isinstance(why, PermissionError) or status in {401, 403} else StoreError
            raise kind(presentable(f"{where}: {type(why).__name__}: {' '.join(str(why).split())}")) from None
