"""Where an export may go (a local file, S3 or standard output), and how a file appears there whole or not at all.

Knows nothing of the contents.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from draftmill.jobs.exporting.rows import Target
from draftmill.jobs.spec.places import path_problem
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.stores.interface import AlreadyExists, S3Options
from draftmill.storage.stores.local import linked, sync_folder

STDOUT = "-"
OUT, ERRORS = "--out", "--errors"
S3 = "s3://"


# ---- which places are valid


def errors_beside(out: str) -> str:
    """`answers.jsonl` -> `answers.errors.jsonl`, in the same folder or under the same prefix."""
    if out == STDOUT:
        raise UserError("with --format openai, failed samples need a separate file; name one", field=ERRORS)
    folder, slash, name = out.rstrip("/").rpartition("/")
    stem, suffix = os.path.splitext(name)
    return f"{folder}{slash}{stem}.errors{suffix}"


def check_places(run_url: str, kind: str, out: str, errors: str | None) -> None:
    """Raise UserError for a place that can't or must not be written. Contacts no server."""
    for field, place in ((OUT, out), (ERRORS, errors)):
        if place is None or place == STDOUT:
            continue
        problem = "'' is not a path" if not place else path_problem(place, ("s3",)) or _key_problem(place)
        if problem is None and _inside(place, run_url):
            problem = f"{place!r} is inside the run directory, which may hold only the run's own files"
        if problem is not None:
            raise UserError(problem, field=field)
    if errors is not None and errors in {out, STDOUT}:
        raise UserError(f"{errors!r} can't take the failed samples; name a separate file", field=ERRORS)
    if kind == "parquet" and out == STDOUT:
        raise UserError("Parquet can't be written to standard output; name a file", field=OUT)


def _key_problem(place: str) -> str | None:
    if not place.startswith(S3):
        return None
    bucket, _, key = place.removeprefix(S3).partition("/")
    if not bucket or {"", ".", ".."} & set(key.split("/")):
        return f"{place!r} does not name an object; allowed: s3://bucket/key, without empty parts, . and .. in the key"
    return None


def _inside(place: str, run_url: str) -> bool:
    if place.startswith(S3) or "://" in run_url:
        return f"{place}/".startswith(f"{run_url.rstrip('/')}/")
    return Path(place).expanduser().resolve().is_relative_to(Path(run_url).expanduser().resolve())


# ---- writing


def written(place: str, *, field: str, overwrite: bool, s3: S3Options | None) -> AbstractContextManager[Target]:
    """A file that appears under its name when the block succeeds; if the block raises, nothing is left.

    Raises UserError if the place can't be written. `field` is the argument that names the place.
    """
    if place == STDOUT:
        return _standard_output()
    if place.startswith(S3):
        return _object(place, field, overwrite, s3 or S3Options())
    return _local_file(place, field, overwrite)


@contextmanager
def _standard_output() -> Iterator[IO[bytes]]:
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@contextmanager
def _object(place: str, field: str, overwrite: bool, options: S3Options) -> Iterator[Target]:
    # Imported only here: importing boto3 takes a third of a second, and an export to local disk doesn't need it.
    from draftmill.storage.stores.s3 import S3Store
    from draftmill.storage.stores.upload import Upload, abort_orphans

    bucket, _, key = place.removeprefix(S3).partition("/")
    store = S3Store(f"{S3}{bucket}", options)
    abort_orphans(store, key)
    if not overwrite and store.exists(key):
        raise _taken(place, field)
    try:
        with Upload(store, key, overwrite=overwrite) as file:
            yield file
    except AlreadyExists:
        raise _taken(place, field) from None


@contextmanager
def _local_file(place: str, field: str, overwrite: bool) -> Iterator[IO[bytes]]:
    path = Path(place).expanduser().resolve()  # write a link's target and keep the link
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        if path.is_dir():
            raise UserError(f"{place!r} is a folder", field=field)
        if path.exists() and not path.is_file():
            with path.open("wb") as file:  # a pipe or a device: write to it directly, never replace it
                yield file
            return
        if path.exists() and not overwrite:
            raise _taken(place, field)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        elif not linked(temporary, path):  # another program was faster
            raise _taken(place, field)
        sync_folder(path.parent)
    except OSError as error:
        kind = UserError if error.filename is not None else StoreError
        raise kind(f"{place}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _taken(place: str, field: str) -> UserError:
    return UserError(f"{place!r} already exists; --overwrite replaces it", field=field)
