"""What is sent to the cluster for a spec: the command of the driver, its environment, and the files it takes along.

The files are our package and a folder of the user's, as one zip file. Ray keeps packages by their hash, and equal content gives
equal files: an unchanged one is not sent again. A path of the spec means a file in the shipped folder, on storage that every node
mounts, or in a bucket. One that the cluster could not resolve is refused, with its key, before anything is sent.
"""

from __future__ import annotations

import os
import re
import shlex
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from draftmill.actors.ray.ray_inside import PATHSPEC, require
from draftmill.jobs.driving.ray_session import ROOT
from draftmill.jobs.formatting import size_text
from draftmill.jobs.spec.job_spec import check_spec
from draftmill.jobs.spec.places import is_inside, places_of
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
    """A job to submit: a command of sh, a runtime_env of Ray, and the shipped files by their name in the package."""

    entrypoint: str
    environment: Mapping[str, Any]
    files: Mapping[str, Path]
    rest: Mapping[str, Any] = field(default_factory=dict)


def request_of(data: Mapping[str, Any], options: SubmitOptions) -> Request:
    """The request for the mapping of a checked spec; UserError for what the cluster could not find or would refuse."""
    ships = options.code == "ship" or (options.code is None and options.image is None)
    _check_image(options, ships=ships)
    folder = None if options.working_dir is None else Path(options.working_dir).expanduser().absolute()
    files = {} if folder is None else folder_files(folder, options.excludes)
    paths = PathMapping(folder, frozenset(files), tuple(_shared_folder(path) for path in options.shared))
    spec = yaml.safe_dump(map_paths(data, paths), sort_keys=False, allow_unicode=True, width=120)
    if len(spec) > MAX_SPEC or f"\n{_END}\n" in spec:
        raise UserError(f"a spec of {len(spec):,} characters; the maximum is {MAX_SPEC:,}", field="SPEC")
    return Request(
        entrypoint(spec, options, ships=ships),
        environment(options),
        package_files(code_files(data) if ships else {}, files),
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
    image = {} if options.image is None else {"image_uri": options.image}
    pip = {"pip": list(options.pip)} if options.pip else {}
    return {"env_vars": variables | dict(map(_variable, options.env))} | image | pip


def requirements(names: Sequence[str]) -> tuple[str, ...]:
    """The requirements of pip files; UserError for a line that refers to other files, which the cluster lacks."""
    requirements: list[str] = []
    for name in names:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: {getattr(error, 'strerror', None) or error}", field="--requirements") from None
        for line in (line.partition(" #")[0].strip() for line in lines if not line.lstrip().startswith("#")):
            if line.startswith(("-r", "-c", "-e", "--requirement", "--constraint", ".", "/")):
                raise UserError(f"{name}: {line!r} refers to a file of this machine", field="--requirements")
            requirements += [line] if line else []
    return tuple(requirements)


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


def _shared_folder(path: str) -> Path:
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


# ---- what the paths of a spec mean on the cluster


_WILD = re.compile(r"[*?\[{]")


@dataclass(frozen=True, slots=True)
class PathMapping:
    """What the cluster can read: the shipped `folder` (None if there is none) with its `files` by name, and `shared` folders."""

    folder: Path | None = None
    files: frozenset[str] = frozenset()
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
    """Set a value in a spec's mapping, in which a metric may be written as its path alone, and a preset's keys are missing."""
    for key in keys[:-1]:
        inner: Any = data.setdefault(key, {}) if isinstance(data, dict) else data[key]
        if isinstance(inner, str):
            break
        data = inner
    else:
        key = keys[-1]
    data[key] = value


# ---- the files that are shipped, as one zip file


MAX_BYTES = 200 * 2**20
"""The largest package: the head node holds it in memory. Larger inputs and models belong into a bucket or on shared storage."""

EXCLUDES = (
    ".git/", ".hg/", ".svn/", ".venv/", "venv/", "__pycache__/", "*.pyc", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/",
    ".ipynb_checkpoints/", "node_modules/", ".env", ".env.*", "*.pem", "*.key", ".aws/", ".ssh/", ".netrc", ".DS_Store",
)  # fmt: skip
"""Never shipped: what is made again, and files that usually hold secrets."""

IGNORE_FILES = (".gitignore", ".rayignore")
PACKAGE = "draftmill"
BUILTIN = f"{PACKAGE}/decoders/builtin"


def write_package(files: Mapping[str, Path], out: Path) -> None:
    """Write the zip file; the same files give the same bytes."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(files.items()):
            info = zipfile.ZipInfo(name)  # its date is fixed
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if os.access(path, os.X_OK) else 0o100644) << 16
            archive.writestr(info, path.read_bytes(), compresslevel=1)


def code_files(data: Any, root: Path = ROOT) -> dict[str, Path]:
    """The files of our package by name, with those builtin models that the spec's mapping names."""
    models = set(re.findall(r"builtin:([\w.-]+)", yaml.safe_dump(data)))
    paths: dict[str, Path] = {}
    for folder, _, files in os.walk(root / PACKAGE, followlinks=True):  # a checkout's package has links
        for path in (Path(folder, file) for file in files if "__pycache__" not in folder):
            name = path.relative_to(root).as_posix()
            if not name.startswith(f"{BUILTIN}/") or name.removeprefix(f"{BUILTIN}/").split("/")[0] in models:
                paths[name] = path
    return paths


def folder_files(folder: Path, excludes: Sequence[str] = ()) -> dict[str, Path]:
    """The files of a folder by name, without those that EXCLUDES, `excludes` or its .gitignore and .rayignore files drop.

    Patterns are written as in .gitignore. UserError if the folder is none.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder", field="--working-dir")
    try:
        return dict(_walk(folder, folder, [("", _matcher([*EXCLUDES, *excludes]))]))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}", field="--working-dir") from None


def package_files(
    code: Mapping[str, Path], folder: Mapping[str, Path], *, max_bytes: int = MAX_BYTES
) -> dict[str, Path]:
    """Both together. UserError if they are too large, or if the folder has files of its own under names of the code."""
    clash = sorted(name for name in folder if name.split("/")[0] == PACKAGE and not _same(folder[name], code.get(name)))
    if code and clash:
        raise UserError(
            f"{clash[0]!r} would mix with draftmill's own package, which is shipped too; "
            "use --code installed if the cluster has draftmill, or exclude it (--exclude)",
            field="--working-dir",
        )
    files = {**folder, **code}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if (num_bytes := sum(sizes.values())) > max_bytes:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(f"{name} ({size_text(sizes[name])})" for name in largest)
        raise UserError(
            f"{size_text(num_bytes)} are too much to ship, the maximum is {size_text(max_bytes)}; the largest are {listed}; "
            "drop files with --exclude PATTERN, or put them on s3:// or on shared storage",
            field="--working-dir",
        )
    return files


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and (path.samefile(other) or path.read_bytes() == other.read_bytes())


def _walk(root: Path, folder: Path, rules: list[tuple[str, Any]]) -> Iterator[tuple[str, Path]]:
    base = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    own = (folder / name for name in IGNORE_FILES if (folder / name).is_file())
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in own)
    rules = [*rules, *((base, _matcher(text.splitlines())) for text in texts)]
    for entry in sorted(folder.iterdir()):
        name = f"{base}{entry.name}"
        is_folder = entry.is_dir() and not entry.is_symlink()
        if any(spec.match_file((name + "/" * is_folder).removeprefix(start)) for start, spec in rules):
            continue
        if is_folder:
            yield from _walk(root, entry, rules)
        elif entry.is_file():
            yield name, entry


def _matcher(patterns: Iterable[str]) -> Any:
    # Ray brings this library along and reads .gitignore files with it, too.
    return require(PATHSPEC).from_lines("gitwildmatch", patterns)
