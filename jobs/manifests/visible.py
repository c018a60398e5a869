"""Which local paths of a spec a cluster can see. One that it can't see is refused, with its key in the spec."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator

from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.jobs.spec.places import places_of
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import is_local

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")
"""Folders that each machine of a Slurm cluster has for itself."""

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.gguf)|\w[\w.-]*/\w[\w.-]*/\w[\w.-]*\.gguf", re.ASCII)
"""A model id of the hub, ORG/NAME or NAME, or a GGUF file in one."""
NOT_PATHS = frozenset({"auto", "none"})


def local_places(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The key and the path of everything in a spec that is on a local disk."""
    for key, path in (*places_of(spec), *_metric_places(spec)):
        if not is_local(path) or path.startswith("builtin:"):
            continue
        if key.startswith(("input.", "output.")) or key.endswith(".file") or _is_on_disk(path):
            yield key.removesuffix(".file"), path


def _metric_places(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for index, metric in enumerate(spec.metrics):
        if isinstance(path := getattr(metric, "path", None), str):
            yield f"metrics.{index}.path.file", path
        if isinstance(model := getattr(metric, "model", None), str):
            yield f"metrics.{index}.model", model


def _is_on_disk(path: str) -> bool:
    """Whether a model's path means a folder or file of this machine: one that exists, as in checkpoints/models.py."""
    if path in NOT_PATHS:
        return False
    return os.path.exists(os.path.expanduser(path)) or not HUB_ID.fullmatch(path)


def on_s3(spec: JobSpec) -> bool:
    """Whether the job reads from S3 or writes to it."""
    return any(path.startswith("s3://") for _, path in places_of(spec))


def refuse_memory(spec: JobSpec) -> None:
    """Refuse results that would be lost with the process."""
    if spec.output.path.startswith("memory:"):
        raise UserError(
            f"{spec.output.path!r} is lost when the job ends; allowed: a path that outlives it", field="output.path"
        )


def refuse_unseen(spec: JobSpec, shared: Iterable[str], *, how: str) -> None:
    """Refuse local paths outside of the folders in `shared`; `how` says what makes a folder visible."""
    roots = tuple(shared)
    for key, path in local_places(spec):
        if not under(path, roots):
            raise UserError(
                f"{path!r} is a path of this machine, which the cluster can't see; allowed: s3://..., or {how}",
                field=key,
            )


def refuse_node_local(places: Iterable[tuple[str, str]], directory: str, shared: Iterable[str]) -> None:
    """Refuse paths in folders that each machine has for itself, unless `shared` names them."""
    roots = tuple(shared)
    for key, path in places:
        full = posixpath.normpath(posixpath.join(directory, os.path.expanduser(path)))
        if under(full, NODE_LOCAL) and not under(full, roots):
            raise UserError(
                f"{path!r} is in a folder that each node has for itself; allowed: a path on a shared file system "
                "(--shared-path FOLDER says that a folder is on one), or --nodes 1",
                field=key,
            )


def under(path: str, roots: Iterable[str]) -> bool:
    """Whether an absolute path is one of the folders or inside one of them."""
    path = posixpath.normpath(path)
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in map(posixpath.normpath, roots))


def check_folder(path: str, field: str) -> str:
    """Return the normal form of an absolute path; UserError if it is not absolute."""
    if not path.startswith("/"):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field=field)
    return posixpath.normpath(path)
