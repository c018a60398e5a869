"""A driver of fsspec, over memory, like gcsfs and adlfs: it caches what it has listed, and each write is another version."""

from collections.abc import Callable
from itertools import count

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from draftmill.storage.inputs import inputs
from draftmill.storage.stores.fsspec_store import DRIVERS

_versions = count(1)


class Driver(MemoryFileSystem):  # type: ignore[misc]
    """Objects under `BUCKET/name`, of one scheme."""

    root_marker = ""
    versions: dict[str, int]
    cached: dict[str, bytes]
    """What a cache of Google's answers for public objects if no generation is asked for."""

    after_read: Callable[[], object] | None = None
    """Called once, between a read's bytes and the reader's next question."""

    wrote: Callable[[str], object] | None = None
    """Called after each write."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs) -> None:
        super().pipe_file(path, value)
        self.versions[path] = next(_versions)
        self.dircache.pop(path, None)
        if self.wrote is not None:
            self.wrote(path)

    def info(self, path: str, **kwargs) -> dict:
        found = self.dircache.get(path) or self._as_driver(super().info(path))
        self.dircache[path] = found
        return found

    def find(self, path: str, maxdepth=None, withdirs: bool = False, detail: bool = False, **kwargs):
        assert detail and not self.isfile(path)  # adlfs gives no details of a file
        infos = map(self._as_driver, super().find(path, detail=True).values())
        return {info["name"]: info for info in infos}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs) -> bytes:
        if "generation" not in kwargs and path in self.cached:
            return self.cached[path][start:end]
        if kwargs.get("generation", str(self.versions.get(path))) != str(self.versions.get(path)):
            raise FileNotFoundError(path)
        data = super().cat_file(path, start, end)
        if (start or 0) >= len(self.store[self._strip_protocol(path)].getvalue()):
            raise ValueError("416: the range is not satisfiable")
        if self.after_read is not None:
            hook, self.after_read = self.after_read, None
            hook()
        return data

    def _as_driver(self, info: dict) -> dict:
        info = info | {"name": info["name"].removeprefix("/")}
        if info["type"] == "file":
            info |= {"etag": '"same"', DRIVERS[self.protocol][1]: f'"{self.versions[info["name"]]}"'}
        return info


def register(monkeypatch: pytest.MonkeyPatch, scheme: str) -> Driver:
    """Let `scheme` be an empty Driver for this test, and return it."""
    inputs._open.cache_clear()
    objects = {"store": {}, "pseudo_dirs": [""], "versions": {}, "cached": {}}
    kind = type("Driver", (Driver,), {"protocol": scheme, **objects})
    monkeypatch.setitem(_registry, scheme, kind)
    return kind(use_listings_cache=False)
