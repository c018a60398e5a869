"""What is sent to the cluster for a spec: the command of the driver, its environment, and the files it takes along."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from draftmill.jobs.submitting.package import Shipment, code_files, folder_files, shipment
from draftmill.jobs.submitting.places import PathMapping, mapped
from draftmill.storage.errors import UserError
from draftmill.storage.secrets import is_secret_variable

MARGIN_S = 15.0
"""Seconds between the driver's grace period and its end by force."""

MAX_SPEC = 64 * 1024
"""Characters of a spec: it travels in the command, which Linux limits to 128 KiB."""

_END = "END_OF_SPEC"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What the user wants of a submitted job, beside its spec. `run` are further options of `draftmill run`."""

    code: Literal["ship", "installed"] | None = None
    working_dir: str | None = None
    excludes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    image: str | None = None
    pip: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    grace_s: float = 30.0
    driver_cpus: float = 0.0
    run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A job to submit: `spec` is the shipped YAML, `entrypoint` a command of sh, `environment` a runtime_env of Ray."""

    spec: str
    entrypoint: str
    environment: Mapping[str, Any]
    shipment: Shipment
    rest: Mapping[str, Any] = field(default_factory=dict)


def request_of(data: Mapping[str, Any], options: SubmitOptions) -> Request:
    """The request for the mapping of a checked spec; UserError for what the cluster could not find or would refuse."""
    ships = options.code == "ship" or (options.code is None and options.image is None)
    _check_image(options, ships=ships)
    folder = None if options.working_dir is None else Path(options.working_dir).expanduser().absolute()
    files = {} if folder is None else folder_files(folder, options.excludes)
    paths = PathMapping(folder, frozenset(files), tuple(_shared(path) for path in options.shared))
    spec = yaml.safe_dump(mapped(data, paths), sort_keys=False, allow_unicode=True, width=120)
    if len(spec) > MAX_SPEC or f"\n{_END}\n" in spec:
        raise UserError(f"a spec of {len(spec):,} characters; the maximum is {MAX_SPEC:,}", field="SPEC")
    return Request(
        spec,
        entrypoint(spec, options, ships=ships),
        environment(options),
        shipment(code_files(data) if ships else {}, files),
        {"entrypoint_num_cpus": options.driver_cpus} if options.driver_cpus else {},
    )


def entrypoint(spec: str, options: SubmitOptions, *, ships: bool) -> str:
    """The command: writes the spec to a file of its own and becomes the driver, so that signals reach it."""
    command = "python -m draftmill.jobs.cli" if ships else "draftmill"
    run_options = shlex.join(["--ray-address", "auto", "--grace-seconds", f"{options.grace_s:g}", *options.run])
    return (
        f"folder=$(mktemp -d) && cat > \"$folder/job.yaml\" <<'{_END}' && "
        f'exec {command} run "$folder/job.yaml" {run_options}\n{spec.rstrip()}\n{_END}'
    )


def environment(options: SubmitOptions) -> dict[str, Any]:
    """Ray's runtime_env, without the working directory."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        # Ray's own patience with a job that is stopped is 3 s.
        "RAY_JOB_STOP_WAIT_TIME_S": f"{options.grace_s + MARGIN_S:.0f}",
    }
    found: dict[str, Any] = {"env_vars": variables | dict(map(_variable, options.env))}
    if options.image is not None:
        found["image_uri"] = options.image
    if options.pip:
        found["pip"] = list(options.pip)
    return found


def requirements(names: Sequence[str]) -> tuple[str, ...]:
    """The requirements of pip files; UserError for a line that refers to other files, which the cluster lacks."""
    found: list[str] = []
    for name in names:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: {getattr(error, 'strerror', None) or error}", field="--requirements") from None
        kept = [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        local = [
            line for line in kept if line.startswith(("-r", "-c", "-e", "--requirement", "--constraint", ".", "/"))
        ]
        if local:
            raise UserError(f"{name}: {local[0]!r} refers to a file of this machine", field="--requirements")
        found += kept
    return tuple(found)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not the name of a variable; write NAME or NAME=VALUE", field="--env")
    if is_secret_variable(name):
        raise UserError(
            f"{name} would be readable for everyone who can see the cluster's jobs; set it on the cluster's nodes instead "
            "(on Kubernetes from a Secret)",
            field="--env",
        )
    if not equals and name not in os.environ:
        raise UserError(f"{name} is not set here; set it, or write {name}=VALUE", field="--env")
    return name, value if equals else os.environ[name]


def _shared(path: str) -> Path:
    if not os.path.isabs(path):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field="--shared")
    return Path(os.path.normpath(path))


def _check_image(options: SubmitOptions, *, ships: bool) -> None:
    if options.excludes and options.working_dir is None:
        raise UserError("nothing is shipped; it needs --working-dir", field="--exclude")
    if options.image is None:
        return
    for option, given in (("--working-dir", options.working_dir), ("--pip", options.pip), ("--code ship", ships)):
        if given:
            raise UserError(f"Ray does not combine an image with {option}; use only one of the two", field="--image")
