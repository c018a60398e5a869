"""Jobs on the real model by the command line's own code and a Ray of this machine, and their rows."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from draftmill.jobs.cli import main

Row = dict
PLACES = {"unit", "attempt", "worker", "node", "started_at", "batch_rows", "pad_fraction", "device_s"}
TIMES = {"wait_s", "prefill_s", "decode_s", "total_s"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the jobs are: one folder each below `root`; `model` is the checkpoint's path as a spec has it."""

    root: Path
    model: str
    threads: int

    def spec(self, name: str, task: Mapping, rows: Sequence[Mapping], **changes) -> Path:
        """Write the input and the spec of a job; `changes` are further sections, merged key by key."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "input.jsonl").write_text("".join(lines), encoding="utf-8")
        spec: dict = {
            "name": name,
            "seed": 11,
            "task": dict(task),
            "input": {"path": str(folder / "input.jsonl")},
            "model": {"path": self.model},
            "decoder": {"kind": "autoregressive"},
            "sampling": {"temperature": 0.0},
            "workers": {"count": 1, "cpus": self.threads},
            "errors": {"max_count": 0},
            "output": {"path": str(folder / "run"), "unit_rows": 16},
        }
        for key, value in changes.items():
            spec[key] = {**spec.get(key, {}), **value} if isinstance(value, dict) and key != "decoder" else value
        (folder / "spec.yaml").write_text(yaml.safe_dump(spec, allow_unicode=True), encoding="utf-8")
        return folder

    def run(self, name: str, task: Mapping, rows: Sequence[Mapping], **changes) -> dict[str, Row]:
        """The result rows of a job by id. AssertionError unless it ends with 0 and `verify` finds its promises kept."""
        return finish(self.spec(name, task, rows, **changes))


def finish(folder: Path) -> dict[str, Row]:
    """Run a job, or go on with it, to its end; check its promises; return its rows by id."""
    code, said = call("run", str(folder / "spec.yaml"), "--quiet")
    assert code == 0, f"run ended with {code}: {said[-1500:]}"
    code, said = call("verify", str(folder / "run"))
    assert code == 0, f"verify ended with {code}: {said[-1500:]}"
    return rows_of(folder)


def rows_of(folder: Path) -> dict[str, Row]:
    found = [
        row for file in sorted((folder / "run" / "data").glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    by_id = {row["id"]: row for row in found}
    assert len(by_id) == len(found), "an id stands twice"
    return by_id


def call(*arguments: str) -> tuple[int, str]:
    """The exit code of the command line and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(list(arguments))
    return code, said.getvalue()


def kill_after(folder: Path, units: int, *, timeout_s: float = 600.0) -> int:
    """Run a job in a process of its own, kill it when so many units are committed; returns how many there are then."""
    data = folder / "run" / "data"
    process = subprocess.Popen(
        [sys.executable, "-m", "draftmill.jobs.cli", "run", str(folder / "spec.yaml"), "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + timeout_s
    while len(list(data.glob("*.parquet"))) < units and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return len(list(data.glob("*.parquet")))


def same(one: Mapping[str, Row], other: Mapping[str, Row], columns: Iterable[str]) -> int:
    """How many rows of two jobs agree in these columns, to the bit."""
    columns = list(columns)
    return sum(all(row[name] == other[key][name] for name in columns) for key, row in one.items() if key in other)
