"""`draftmill manifest`: the manifest of a job, printed, or written to a file or folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from draftmill.jobs.exit_codes import OK
from draftmill.jobs.manifests.job import Job, read_job
from draftmill.jobs.manifests.kubernetes import cronjob, with_cluster
from draftmill.jobs.manifests.machines import cron, ray_up, service, slurm, timer
from draftmill.jobs.manifests.options import Options
from draftmill.storage.errors import UserError

MAKERS: Mapping[str, Callable[[Job], str]] = {
    "rayjob": with_cluster,
    "raycronjob": with_cluster,
    "raycluster": with_cluster,
    "cronjob": cronjob,
    "slurm": slurm,
    "cron": cron,
    "ray-up": ray_up,
}
"""The kinds of one file; systemd has two."""


def manifest(spec: str, overrides: Sequence[str], options: Options, out: str | None, *, overwrite: bool = False) -> int:
    """Print or write the manifest; returns 0. UserError if the spec, an option or the place to write is unusable."""
    files = manifest_files(read_job(spec, overrides, options))
    if out is None:
        sys.stdout.write(printed(files))
        return OK
    for name, text in files.items():
        _write(_target(out, name, files), text, overwrite=overwrite)
    return OK


def manifest_files(job: Job) -> dict[str, str]:
    """The manifest's files by name."""
    if job.options.kind == "systemd":
        return {f"{job.name}.service": service(job), f"{job.name}.timer": timer(job)}
    ending = {"slurm": "sh", "cron": "cron"}.get(job.options.kind, "yaml")
    return {f"{job.name}.{ending}": MAKERS[job.options.kind](job)}


def printed(files: Mapping[str, str]) -> str:
    """One file as it is; several one after the other, each after a line with its name."""
    if len(files) == 1:
        return "".join(files.values())
    return "\n".join(f"# ==> {name} <==\n{text}" for name, text in files.items())


def _target(out: str, name: str, files: Mapping[str, str]) -> Path:
    """The file to write: `out` itself, or a file in it if it is a folder or there are several files."""
    path = Path(out)
    if len(files) == 1 and not path.is_dir() and not out.endswith("/"):
        return path
    if path.exists() and not path.is_dir():
        raise UserError(f"{out!r} is a file; allowed: a folder, for the files {', '.join(files)}", field="--out")
    return path / name


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{os.fspath(path)!r} exists; allowed: another path, or --overwrite", field="--out") from None
    except OSError as error:
        raise UserError(f"{os.fspath(path)!r}: {error.strerror or error}", field="--out") from None
    print(f"wrote {path}")
