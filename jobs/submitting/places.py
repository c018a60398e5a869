"""What a spec's paths mean on the cluster: in the shipped folder, on storage that every node mounts, in a bucket, or nowhere.

A path that the cluster could not resolve is refused here, with its key, before anything is sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.storage.errors import UserError

_WILD = re.compile(r"[*?\[{]")
_FREE = {"model.path": (), "model.adapter": (), "model.tokenizer": ("auto", "none"), "decoder.head": ("auto", "none")}
"""Keys of checkpoints, with their words: what is no local path may be a model id of the hub."""


@dataclass(frozen=True, slots=True)
class PathMapping:
    """What the cluster can read: the shipped `folder` (None if there is none) with its `files` by name, and `shared` folders."""

    folder: Path | None = None
    files: frozenset[str] = frozenset()
    shared: tuple[Path, ...] = ()

    def path(self, value: str, field: str, *, written: bool = False) -> str:
        """A local path as the cluster finds it; UserError with its key if it can't. `written`: the job writes there."""
        here = os.path.abspath(os.path.expanduser(value))
        if any(_inside(here, str(folder)) for folder in self.shared):
            return here
        if written:
            raise UserError(f"{value!r} is a folder of this machine; allowed: {_remote()}", field=field)
        if self.folder is None or not _inside(here, str(self.folder)):
            shipped = "" if self.folder is None else f", which is not in the shipped folder {str(self.folder)!r}"
            raise UserError(
                f"{value!r} is a path of this machine{shipped}; ship its folder (--working-dir), or use: {_remote()}",
                field=field,
            )
        inner = os.path.relpath(here, self.folder)
        if not self._has(inner):
            raise UserError(
                f"{value!r} is not among the shipped files: it does not exist, or an exclude, .gitignore or .rayignore drops it",
                field=field,
            )
        return inner

    def _has(self, inner: str) -> bool:
        wild = _WILD.search(inner)
        if inner in self.files or inner == ".":
            return bool(self.files)
        folder = inner[: wild.start()].rpartition("/")[0] if wild else inner
        return any(not folder or name.startswith(f"{folder}/") for name in self.files)


def _remote() -> str:
    return "s3://..., or a folder that every node of the cluster has under the same name (--shared FOLDER)"


def _inside(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def mapped(data: Mapping[str, Any], paths: PathMapping) -> dict[str, Any]:
    """The mapping of a checked spec with paths as the cluster finds them; UserError if one can't be found there."""
    result = deepcopy(dict(data))
    for field, value, put in _paths(result):
        if "://" in value and not value.startswith("memory://"):
            continue
        if "://" in value:
            raise UserError(f"{value!r} ends with the driver; allowed: {_remote()}", field=field)
        put(paths.path(value, field, written=field == "output.path"))
    return result


Put = Callable[[str], None]


def _paths(data: dict[str, Any]) -> Iterator[tuple[str, str, Put]]:
    """Every path of a spec, with its key and what replaces it."""
    yield from _listed(data.get("input"), "path", "input.path")
    for key, words in _FREE.items():
        section, _, name = key.partition(".")
        yield from _checkpoint(data.get(section), name, key, words)
    decoder = data.get("decoder")
    if isinstance(decoder, dict):
        yield from _checkpoint(decoder.get("drafter"), "path", "decoder.drafter.path", ())
    metrics = data.get("metrics")
    if isinstance(metrics, list):
        for index, metric in enumerate(metrics):
            if isinstance(metric, str) and metric.endswith(".py"):
                yield f"metrics.{index}", metric, _into(metrics, index)
            elif isinstance(metric, dict) and metric.get("kind") == "file":
                yield f"metrics.{index}.path", str(metric["path"]), _into(metric, "path")
            yield from _checkpoint(metric, "model", f"metrics.{index}.model", ())
    yield from _listed(data.get("output"), "path", "output.path")


def _listed(section: Any, name: str, key: str) -> Iterator[tuple[str, str, Put]]:
    value = section.get(name) if isinstance(section, dict) else None
    if isinstance(value, str) and not value.startswith("builtin:"):
        yield key, value, _into(section, name)
    if isinstance(value, list):
        for index, one in enumerate(value):
            if isinstance(one, str) and not one.startswith("builtin:"):
                yield f"{key}.{index}", one, _into(value, index)


def _checkpoint(section: Any, name: str, key: str, words: Sequence[str]) -> Iterator[tuple[str, str, Put]]:
    value = section.get(name) if isinstance(section, dict) else None
    if not isinstance(value, str) or value.startswith("builtin:") or value in words:
        return
    is_local = value.startswith(("/", "./", "../", "~")) or value.endswith(".gguf") or Path(value).exists()
    if is_local or "://" in value:
        yield key, value, _into(section, name)


def _into(holder: Any, key: str | int) -> Put:
    def put(value: str) -> None:
        holder[key] = value

    return put
