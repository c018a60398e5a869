"""What a submitted job takes along: our package and a folder of the user's, as one zip file. Equal content gives equal files.

Ray keeps packages by their hash, so an unchanged one is not sent again.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.actors.ray.ray_inside import PATHSPEC, required
from draftmill.jobs.driving.ray_session import ROOT
from draftmill.jobs.formatting import size_text
from draftmill.storage.errors import UserError

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


@dataclass(frozen=True, slots=True)
class Shipment:
    """Files by their name in the package."""

    files: Mapping[str, Path]

    @property
    def num_bytes(self) -> int:
        """Their size before compression."""
        return sum(path.stat().st_size for path in self.files.values())

    def write(self, path: Path) -> None:
        """Write the zip file; the same files give the same bytes."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name in sorted(self.files):
                info = zipfile.ZipInfo(name)  # its date is fixed
                info.compress_type = zipfile.ZIP_DEFLATED
                is_program = os.access(self.files[name], os.X_OK)
                info.external_attr = (0o100755 if is_program else 0o100644) << 16
                archive.writestr(info, self.files[name].read_bytes(), compresslevel=1)


def code_files(data: Any, root: Path = ROOT) -> dict[str, Path]:
    """The files of our package by name, with those builtin models that the spec's mapping names."""
    named = {value.removeprefix("builtin:") for value in _strings(data) if value.startswith("builtin:")}
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(root / PACKAGE, followlinks=True):  # a checkout's package has links
        for path in (Path(folder, file) for file in files if "__pycache__" not in folder):
            name = path.relative_to(root).as_posix()
            if not name.startswith(f"{BUILTIN}/") or name.removeprefix(f"{BUILTIN}/").split("/")[0] in named:
                found[name] = path
    return found


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


def shipment(code: Mapping[str, Path], folder: Mapping[str, Path], *, max_bytes: int = MAX_BYTES) -> Shipment:
    """Both together. UserError if they are too large, or if the folder has files of its own under names of the code."""
    clash = sorted(name for name in folder if name.split("/")[0] == PACKAGE and not _same(folder[name], code.get(name)))
    if code and clash:
        raise UserError(
            f"{clash[0]!r} would mix with draftmill's own package, which is shipped too; "
            "use --code installed if the cluster has draftmill, or exclude it (--exclude)",
            field="--working-dir",
        )
    both = Shipment({**folder, **code})
    if both.num_bytes > max_bytes:
        largest = sorted(both.files, key=lambda name: -both.files[name].stat().st_size)[:3]
        listed = ", ".join(f"{name} ({size_text(both.files[name].stat().st_size)})" for name in largest)
        raise UserError(
            f"{size_text(both.num_bytes)} are too much to ship, the maximum is {size_text(max_bytes)}; the largest are {listed}; "
            "drop files with --exclude PATTERN, or put them on s3:// or on shared storage",
            field="--working-dir",
        )
    return both


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and (path.samefile(other) or path.read_bytes() == other.read_bytes())


def _walk(root: Path, folder: Path, rules: list[tuple[str, Any]]) -> Iterator[tuple[str, Path]]:
    base = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    rules = [*rules, *((base, _matcher(_lines(folder / name))) for name in IGNORE_FILES if (folder / name).is_file())]
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
    return required(PATHSPEC).from_lines("gitwildmatch", patterns)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _strings(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _strings(value)
