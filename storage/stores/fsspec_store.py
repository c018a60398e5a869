"""A bucket of another cloud, by fsspec's drivers: gcsfs for gs://, adlfs for az:// and abfs://; and the Hugging Face hub. Inputs
are read from them, and datasets published to them; a run needs writes with a condition, which drivers don't have.

Nor have they reads with one, as S3's If-Match. So the object's version is compared after each read. A version that was
replaced never comes back: an object that is the planned version after a read was so during the read.

A new scheme needs an entry in DRIVERS, once it is known which of the driver's facts changes with every write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.secrets import presentable
from draftmill.storage.stores.store import Conflict, NotFound, Stat

DRIVERS: Final = {"gs": ("gcsfs", "generation"), "az": ("adlfs", "etag"), "abfs": ("adlfs", "etag")}
"""By scheme, the driver's package, and the fact about an object that identifies its version."""

_HUB: Final = {"hf": ("huggingface_hub", "blob_id")}
"""The hub's driver: an input at hf:// is read by the library `datasets`."""

_HUB_DATASET: Final = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(@[^/@]+)?")

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
        self.url, (package, self._version) = url, (DRIVERS | _HUB)[scheme]
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


class HubStore(FsspecStore):
    """A dataset of the Hugging Face hub, hf://datasets/OWNER/NAME, and its next commit; @REVISION reads another version.

    Data is sent when it is put, and appears with all other changes in one commit. The hub keeps what was sent for a commit that
    failed: it is not sent again. `huggingface_hub` finds the token, and retries.
    """

    def __init__(self, url: str) -> None:
        import huggingface_hub  # it takes a second

        if (match := _HUB_DATASET.fullmatch(url)) is None:
            raise StoreRefused(f"{url!r} is not allowed; allowed: hf://datasets/OWNER/NAME")
        super().__init__(url)
        self._files.invalidate_cache()  # fsspec shares drivers, and this one caches listings
        self._hub, self._api, self._changes = huggingface_hub, huggingface_hub.HfApi(), list[Any]()
        self._dataset: dict[str, Any] = {"repo_id": match[1], "repo_type": "dataset"}

    def put(self, name: str, data: bytes) -> None:
        """Send the data, unless the hub has it, and add it to the commit; a dataset that does not exist is created, private."""
        added = self._hub.CommitOperationAdd(name, data)
        with self._errors(name):
            if not self._changes:
                self._api.create_repo(**self._dataset, private=True, exist_ok=True)
            self._api.preupload_lfs_files(**self._dataset, additions=[added])
        self._changes.append(added)

    def delete(self, name: str) -> None:
        """Add the deletion to the commit."""
        self._changes.append(self._hub.CommitOperationDelete(name))

    def commit(self, message: str) -> None:
        """Let all changes appear at once."""
        with self._errors(""):
            self._api.create_commit(**self._dataset, operations=self._changes, commit_message=message)
