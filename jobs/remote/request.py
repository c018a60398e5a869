"""What is sent to the cluster for a spec: the command of the driver, and its runtime environment.

Ray ships our package and a folder of the user's, and keeps them by their hash: an unchanged one is not sent again. A path of the
spec means a file in the shipped folder, on storage that every node mounts, or in a bucket. One that the cluster could not resolve
is refused, with its key, before anything is sent.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftmill.jobs.config.paths import FoundPlace, is_inside, places_of
from draftmill.jobs.config.spec import JobSpec
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


def request_of(spec: JobSpec, options: SubmitOptions) -> SubmitRequest:
    """The request for a spec; UserError for what the cluster could not find or would refuse."""
    given = {} if options.runtime_env is None else read_mapping(Path(options.runtime_env), "--runtime-env")
    variables = given.get("env_vars") or {}
    for name in variables:
        if is_secret_variable(str(name)):
            raise UserError(
                f"{name} would be readable for everyone who can see the cluster's jobs; set it on the cluster's nodes "
                "instead (on Kubernetes from a Secret)",
                field="--runtime-env",
            )
    folder = options.working_dir or given.get("working_dir")
    if folder is not None:
        given["working_dir"] = folder
    if folder is not None and "://" not in str(folder):
        folder = given["working_dir"] = os.path.abspath(os.path.expanduser(str(folder)))
        if not os.path.isdir(folder):
            raise UserError(f"{folder!r} is not a folder", field="--working-dir")
    else:
        folder = None  # none, or an archive that Ray fetches
    shared = [normal_folder(path, "--shared") for path in options.shared]
    text = json.dumps(spec_there(spec, folder, shared), indent=1, ensure_ascii=False)
    if len(text) > MAX_SPEC:
        raise UserError(f"a spec of {len(text):,} characters; the maximum is {MAX_SPEC:,}", field="SPEC")
    ships = options.code == "ship" or (options.code is None and not any(given.get(key) for key in IMAGES))
    given["env_vars"] = variables | {
        "PYTHONUNBUFFERED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": f"{options.grace_s + MARGIN_S:.0f}",  # Ray's own patience is 3 s
    }
    excludes = [*EXCLUDES, *(given.get("excludes") or [])]
    if ships:
        given["py_modules"] = [str(ROOT / PACKAGE), *(given.get("py_modules") or [])]
        excludes += _unused_models(text)
    if ships or "working_dir" in given:
        given["excludes"] = excludes
    command = "python -P -m draftmill.jobs.cli" if ships else "draftmill"
    run_options = shlex.join(["--ray-address", "auto", "--grace-seconds", f"{options.grace_s:g}", *options.run])
    # The shell becomes the driver, so that signals reach it.
    return SubmitRequest(
        f"folder=$(mktemp -d) && cat > \"$folder/job.yaml\" <<'{_END}' && "
        f'exec {command} run "$folder/job.yaml" {run_options}\n{text}\n{_END}',
        given,
    )


def _unused_models(spec: str) -> list[str]:
    """Patterns of the builtin models that a spec does not name: they are most of our package's bytes."""
    used = set(re.findall(r"builtin:([\w.-]+)", spec))
    folders = sorted(path.name for path in (ROOT / PACKAGE / BUILTIN).iterdir() if path.is_dir())
    return [f"/{BUILTIN}/{name}/" for name in folders if name not in used]


def normal_folder(path: str, field: str) -> str:
    """The normal form of an absolute path; UserError if it is not absolute."""
    if not os.path.isabs(path):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field=field)
    return os.path.normpath(path)


# ---- what the paths of a spec mean on the cluster

REMOTE = "s3://..., or a folder that every node of the cluster has under the same name (--shared FOLDER)"


def spec_there(spec: JobSpec, folder: str | None, shared: Sequence[str]) -> dict[str, Any]:
    """The keys of a spec with paths as the cluster finds them, in the shipped `folder` or a `shared` one.

    UserError for a path that can't be found there.
    """
    data = spec.model_dump(mode="json", exclude_unset=True)
    for found in places_of(spec):
        if found.value.startswith("memory://"):
            raise UserError(f"{found.value!r} ends with the driver; allowed: {REMOTE}", field=found.key)
        if found.is_here:
            inner: Any = data
            for key in found.keys[:-1]:
                inner = inner[key]
            inner[found.keys[-1]] = _path_there(found, folder, shared)
    return data


def _path_there(found: FoundPlace, folder: str | None, shared: Sequence[str]) -> str:
    value, field, here = found.value, found.key, os.path.abspath(os.path.expanduser(found.value))
    if any(is_inside(here, other) for other in shared):
        return here
    if field == "output.path":
        raise UserError(f"{value!r} is a folder of this machine; allowed: {REMOTE}", field=field)
    if folder is None or not is_inside(here, folder):
        shipped = "" if folder is None else f", which is not in the shipped folder {folder!r}"
        raise UserError(
            f"{value!r} is a path of this machine{shipped}; ship its folder (--working-dir), or use: {REMOTE}",
            field=field,
        )
    if not os.path.exists(here) and not glob.glob(here):
        raise UserError(f"{value!r} does not exist", field=field)
    return os.path.relpath(here, folder)
