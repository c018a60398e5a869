"""Recurring jobs for tests: `draftmill run --local` on a spec with a date in its output path, and drivers as processes."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.failpoints import VARIABLE, FailpointError, reset_failpoints
from tests.runs.jobs_of_tests import forked, logged, write_rows, write_spec

KILLS = ("ledger.before_cache", "prune.before_mark", "prune.before_delete")
"""Failpoints of recurring jobs alone, at each of which a test here kills."""

DATED = "{date:%Y-%m-%d}"


def nightly(folder: Path, *, rows: Path | None = None, name: str = "nightly", **changes) -> Path:
    """A spec that writes to `folder`/`name`/DATE."""
    rows = rows or write_rows(folder / "rows.jsonl", 8)
    output = {"path": str(folder / name / DATED), "unit_rows": 4}
    return write_spec(folder, rows=rows, out=name, **{"output": output} | changes)


def run(spec: Path, *options: str) -> int:
    return main(["run", str(spec), "--local", "--quiet", *options])


def interrupted(spec: Path, date: str) -> None:
    """A run of this date that decodes everything and does not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "commit.before_manifest=raise")
        reset_failpoints()
        with pytest.raises(FailpointError):
            run(spec, "--logical-date", date, "--debug")
    reset_failpoints()


def drive(failpoints: str, log: str, *arguments: str) -> None:
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ[VARIABLE] = failpoints
    sys.exit(main(list(arguments)))


def driver(
    spec: Path, log: Path, *options: str, failpoints: str = "", command: Sequence[str] = ()
) -> ForkServerProcess:
    """A driver process, started: `draftmill run`, or another command."""
    return forked(drive, failpoints, str(log), *(command or ("run", str(spec), "--local", "--quiet", *options)))


def units_decoded(run_dir: Path) -> Counter[int]:
    """How often each unit was committed, by the logs of all drivers."""
    return Counter(event["unit"] for event in logged(run_dir, "done"))
