"""What is sent to the cluster for a spec: the command of the driver, and its runtime environment.

Ray ships our package and a folder of the user's, and keeps them by their hash: an unchanged one is not sent again. A path of the
spec means a file in the shipped folder, on storage that every node mounts, or in a bucket. One that the cluster could not resolve
is refused, with its key, before anything is sent.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from draftmill.jobs.config.paths import is_inside, places_of
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.config.yaml_file import read_mapping
from draftmill.storage.errors import UserError
from draftmill.storage.secrets import is_secret_variable
from draftmill.version import ROOT

MARGIN_S = 15.0
"""Seconds between the driver's grace period and its end by force."""

MAX_SPEC = 64 * 1024
"""Characters of a spec: it travels in the command, which Linux limits to 128 KiB."""

_END = "END_OF_SPEC"

IMAGES = ("image_uri", "container")
"""Keys of a runtime environment that bring an image, which has draftmill."""

PACKAGE = "draftmill"
BUILTIN = "decoders/builtin"

EXCLUDES = ("__pycache__/", ".mypy_cache/", ".env", ".env.*", "*.pem", "*.key", ".aws/", ".ssh/", ".netrc")
"""Never shipped: what is made again, and files that usually hold secrets. Ray itself skips .git and virtual environments."""


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What the user wants of a submitted job, beside its spec. `run` are further options of `draftmill run`."""

    code: Literal["ship", "installed"] | None = None
    working_dir: str | None = None
    runtime_env: str | None = None
    shared: tuple[str, ...] = ()
    grace_s: float = 30.0
    run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A job to submit: a command of sh, and a runtime_env of Ray."""

    entrypoint: str
    environment: Mapping[str, Any]


def request_of(data: Mapping[str, Any], options: SubmitOptions) -> SubmitRequest:
    """The request for the mapping of a checked spec; UserError for what the cluster could not find or would refuse."""
    given = _environment(options)
    has_image = any(given.get(key) for key in IMAGES)
    ships = not has_image if options.code is None else options.code == "ship"
    folder = given.get("working_dir")
    is_folder = folder is not None and "://" not in str(folder)
    if is_folder and not Path(str(folder)).is_dir():
        raise UserError(f"{folder!r} is not a folder", field="--working-dir")
    paths = PathMapping(Path(str(folder)) if is_folder else None, tuple(map(_shared_folder, options.shared)))
    spec = yaml.safe_dump(map_paths(data, paths), sort_keys=False, allow_unicode=True, width=120)
    if len(spec) > MAX_SPEC or f"\n{_END}\n" in spec:
        raise UserError(f"a spec of {len(spec):,} characters; the maximum is {MAX_SPEC:,}", field="SPEC")
    return SubmitRequest(
        entrypoint(spec, options, ships=ships), environment(given, data, grace_s=options.grace_s, ships=ships)
    )


def _environment(options: SubmitOptions) -> dict[str, Any]:
    """The runtime_env of the user's file; UserError for a secret in it, which the cluster's dashboard would show."""
    given = {} if options.runtime_env is None else read_mapping(Path(options.runtime_env), "--runtime-env")
    for name in given.get("env_vars") or {}:
        if is_secret_variable(str(name)):
            raise UserError(
                f"{name} would be readable for everyone who can see the cluster's jobs; set it on the cluster's nodes "
                "instead (on Kubernetes from a Secret)",
                field="--runtime-env",
            )
    folder = options.working_dir or given.get("working_dir")
    if folder is not None and "://" not in str(folder):
        given["working_dir"] = os.path.abspath(os.path.expanduser(str(folder)))
    return given


def entrypoint(spec: str, options: SubmitOptions, *, ships: bool) -> str:
    """The command: writes the spec to a file of its own and becomes the driver, so that signals reach it."""
    command = "python -P -m draftmill.jobs.cli" if ships else "draftmill"
    run_options = shlex.join(["--ray-address", "auto", "--grace-seconds", f"{options.grace_s:g}", *options.run])
    return (
        f"folder=$(mktemp -d) && cat > \"$folder/job.yaml\" <<'{_END}' && "
        f'exec {command} run "$folder/job.yaml" {run_options}\n{spec.rstrip()}\n{_END}'
    )


def environment(given: Mapping[str, Any], data: Mapping[str, Any], *, grace_s: float, ships: bool) -> dict[str, Any]:
    """Ray's runtime_env: the user's, our variables and, if our code `ships`, our package with the builtin models of a spec."""
    ours = {
        "PYTHONUNBUFFERED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": f"{grace_s + MARGIN_S:.0f}",  # Ray's own patience with a job that is stopped is 3 s
    }
    result = {**given, "env_vars": {**(given.get("env_vars") or {}), **ours}}
    if ships:
        result["py_modules"] = [str(ROOT / PACKAGE), *(given.get("py_modules") or [])]
    if ships or "working_dir" in given:
        models = _unused_models(data) if ships else []
        result["excludes"] = [*EXCLUDES, *models, *(given.get("excludes") or [])]
    return result


def _unused_models(data: Mapping[str, Any]) -> list[str]:
    """Patterns of the builtin models that a spec does not name: they are most of our package's bytes."""
    used = set(re.findall(r"builtin:([\w.-]+)", yaml.safe_dump(dict(data))))
    folders = sorted(path.name for path in (ROOT / PACKAGE / BUILTIN).iterdir() if path.is_dir())
    return [f"/{BUILTIN}/{name}/" for name in folders if name not in used]


def _shared_folder(path: str) -> Path:
    if not os.path.isabs(path):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field="--shared")
    return Path(os.path.normpath(path))


# ---- what the paths of a spec mean on the cluster


@dataclass(frozen=True, slots=True)
class PathMapping:
    """What the cluster can read: the shipped `folder` (None if there is none), and `shared` folders."""

    folder: Path | None = None
    shared: tuple[Path, ...] = ()

    def path(self, value: str, field: str, *, written: bool = False) -> str:
        """A local path as the cluster finds it; UserError with its key if it can't. `written`: the job writes there."""
        here = os.path.abspath(os.path.expanduser(value))
        if any(is_inside(here, str(folder)) for folder in self.shared):
            return here
        if written:
            raise UserError(f"{value!r} is a folder of this machine; allowed: {_remote()}", field=field)
        if self.folder is None or not is_inside(here, str(self.folder)):
            shipped = "" if self.folder is None else f", which is not in the shipped folder {str(self.folder)!r}"
            raise UserError(
                f"{value!r} is a path of this machine{shipped}; ship its folder (--working-dir), or use: {_remote()}",
                field=field,
            )
        if not os.path.exists(here) and not glob.glob(here):
            raise UserError(f"{value!r} does not exist", field=field)
        return os.path.relpath(here, self.folder)


def _remote() -> str:
    return "s3://..., or a folder that every node of the cluster has under the same name (--shared FOLDER)"


def map_paths(data: Mapping[str, Any], paths: PathMapping) -> dict[str, Any]:
    """The mapping of a checked spec with paths as the cluster finds them; UserError if one can't be found there."""
    result = deepcopy(dict(data))
    for found in places_of(check_spec(deepcopy(result))):
        if found.value.startswith("memory://"):
            raise UserError(f"{found.value!r} ends with the driver; allowed: {_remote()}", field=found.key)
        if found.is_here:
            _put(result, found.keys, paths.path(found.value, found.key, written=found.key == "output.path"))
    return result


def _put(data: Any, keys: Sequence[str | int], value: str) -> None:
    """Set a value in a spec's mapping, in which a metric may be written as its path alone."""
    for key in keys[:-1]:
        inner = data[key]
        if isinstance(inner, str):
            break
        data = inner
    else:
        key = keys[-1]
    data[key] = value
