"""`draftmill report`: writes one HTML file about a finished run, or about the cases of a sweep, with tables and plots."""

from __future__ import annotations

import os
from pathlib import Path

from draftmill.jobs.analysis.page import MADE_BY
from draftmill.jobs.analysis.report import report_page
from draftmill.jobs.analysis.runs import SWEEP, find_runs
from draftmill.jobs.exit_codes import OK
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store

OUT = "--out"


def report(
    place: str, out: str, *, baseline: str | None = None, overwrite: bool = False, s3: S3Options | None = None
) -> int:
    """Write the report on `place` to the local file `out`; returns the exit code.

    `baseline` is the case with which the others are compared. An earlier report is replaced.

    Raises UserError if there is no finished run, if the file exists and is something else, or if
    matplotlib is missing.
    """
    target = checked_target(out, overwrite=overwrite)
    store = open_store(place, s3=s3)
    found = find_runs([place], s3=s3)
    is_sweep = store.exists(SWEEP)
    title = place.rstrip("/").rpartition("/")[2] if is_sweep else found.runs[0].plan.spec.name
    content = report_page(found, f"{'Sweep' if is_sweep else 'Run'}: {title}", baseline=baseline)
    write_whole(target, content.encode())
    print(f"{out}: {len(content.encode()):,} bytes")
    return OK


def checked_target(out: str, *, overwrite: bool) -> Path:
    """The file to write; UserError if it can't be written, before anything is read."""
    target = Path(os.path.expanduser(out))
    if "://" in out:
        raise UserError(f"{out!r} is not a local file", field=OUT)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"{out!r} is a folder, or in a folder that does not exist; allowed: a file", field=OUT)
    if target.exists() and not overwrite and not _is_report(target):
        raise UserError(f"{out!r} exists and is not a report; --overwrite replaces it", field=OUT)
    return target


def _is_report(target: Path) -> bool:
    with target.open("rb") as file:
        return MADE_BY.encode() in file.read(1000)


def write_whole(target: Path, data: bytes) -> None:
    """The file appears whole, or not at all."""
    half = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(data)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
