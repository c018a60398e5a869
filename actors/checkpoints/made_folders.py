"""Cached checkpoint folders that are built from other files, once, and named by a hash of their source.

A separate process does the work: the caller needs no torch, and the memory is free again afterwards. If two callers build the
same folder at once, one waits for the other if the file system has locks; without locks both do the work, and the first
finished folder stays. A folder with its final name is always complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftmill.storage.errors import UserError
from draftmill.storage.json_text import parse_json
from draftmill.version import ROOT

SOURCE = "draftmill_source.json"
"""File that names a folder's source: `weights`, the hash of its weights, and more facts for people."""


def cache_folder() -> Path:
    """The folder for fetched and converted models: DRAFTMILL_CACHE, or the user's cache folder."""
    named = os.environ.get("DRAFTMILL_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "draftmill"


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`; if it does not exist, call `make` on an empty folder and rename that to `target`."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _hold_lock(target.with_name(f"{target.name}.lock")):
        if not target.is_dir():
            make_whole(target, make)
    return target


def make_whole(target: Path, make: Callable[[Path], None]) -> None:
    """Call `make` on a temporary folder and rename that to `target`: a folder with its final name is complete.

    If another process makes the same folder at the same time, the first to finish wins.
    """
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    partial.mkdir(parents=True)
    try:
        make(partial)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file, if the file system has locks. The file is never deleted: another process may be waiting on it."""
    with path.open("a") as file:
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_maker(module: str, arguments: Sequence[str], *, field: str, what: str) -> None:
    """Run `python -m MODULE ARGUMENTS...`, which takes minutes for a large model, and log `what` it does.

    UserError with the module's message if it refuses, RuntimeError if it fails.
    """
    logging.getLogger(__name__).info(f"{what}, once; the result is kept in {cache_folder()}")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"},
    )
    if (refusal := _refusal(done.stdout)) is not None:
        raise UserError(refusal, field=field)
    if done.returncode != 0:
        why = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        raise RuntimeError(f"{module} {why} (signal 9 often means that memory ran out): {done.stderr[-2000:]}")


def refuse(message: str) -> None:
    """Report to `run_maker` why the work can't be done; for the modules that it runs."""
    print(json.dumps({"refused": message}))


def _refusal(output: str) -> str | None:
    """The refusal on the last line of a maker's output; None if there is none."""
    lines = output.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        return None
    return str(answer["refused"]) if isinstance(answer, dict) and "refused" in answer else None


def write_source(folder: Path, source: dict[str, Any]) -> None:
    """Write a folder's source; `source` has the key `weights`."""
    (folder / SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def read_source(folder: Path) -> dict[str, Any] | None:
    """The source that `write_source` wrote; None for any other folder."""
    try:
        source = parse_json((folder / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return source if isinstance(source, dict) else None


def content_hash(file: Path) -> str:
    """SHA-256 of a file's content; cached by path, size and modification time, since models are large."""

    def compute() -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return remember("content", [file], compute)


YOUNG_S = 2.0
"""A file that was changed so recently may change again without a new modification time: some file systems keep seconds."""


def remember(what: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The result of `compute` for these files; cached by `what` and by the files' paths, sizes, modification times and inodes.

    Nothing is cached for a file younger than YOUNG_S, or where the cache can't be written.
    """
    stats = [(file, file.stat()) for file in files]
    parts = [f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}" for file, stat in stats]
    memo = cache_folder() / "hashes" / hashlib.sha256("\0".join([*parts, what]).encode()).hexdigest()[:32]
    with suppress(OSError, UnicodeDecodeError):
        if known := memo.read_text(encoding="ascii"):
            return known
    is_young = max((stat.st_mtime for _, stat in stats), default=0.0) > time.time() - YOUNG_S
    result = compute()
    if not is_young:
        with suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            partial = memo.with_name(f"{memo.name}.{secrets.token_hex(4)}")
            partial.write_text(result, encoding="ascii")
            partial.replace(memo)
    return result
