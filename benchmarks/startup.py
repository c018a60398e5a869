"""Start-up times of commands: wall and CPU seconds to the first token and to the end, with child processes.

    python -m benchmarks.startup [--repeats 3]

Each command is a separate process on builtin:ar-tiny: `--help`, `validate`, `status`, and a job of four prompts with
32 tokens each, on a new Ray and with `--local`. The limit is a bare Python that imports torch
and one model class of transformers, loads the same weights and generates the same number of tokens. The first token's
time is that of the earliest row (`started_at` + `prefill_s`). CPU seconds are polled from all descendants, so those in
their last moment are missing. Other load on the machine affects wall time, but hardly CPU time; the initial load is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from draftmill.actors.checkpoints.models import BUILTIN
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import open_store

PROMPTS = ("def f(x):", "import os", "class A:", "for i in")
NEW_TOKENS = 32
POLL_S = 0.02
GOALS_S = {"job, Ray": 10.0, "job, --local": 6.0, "status": 1.5}
"""Seconds of wall on two quiet cores."""
LIMIT = f"""
import torch, sys, time
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
torch.set_num_threads(1)
model = Qwen2ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
prompts = torch.randint(10, 500, ({len(PROMPTS)}, 4))
model.generate(prompts, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(time.time())
model.generate(prompts, min_new_tokens={NEW_TOKENS}, max_new_tokens={NEW_TOKENS}, do_sample=False, pad_token_id=0)
"""


@dataclass(frozen=True, slots=True)
class Took:
    """One command: seconds until its end, of CPU, and until its first token, None where it decodes nothing."""

    wall_s: float
    cpu_s: float
    first_token_s: float | None = None


def measure(command: list[str]) -> tuple[Took, float, str]:
    """Run a command; returns its times, its start in Unix time, and its output."""
    # With this variable every process compiles what it imports again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began_s, began_unix_s = time.perf_counter(), time.time()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)
        root, seconds = psutil.Process(process.pid), dict[int, float]()
        while process.poll() is None:
            look(root, seconds)
            time.sleep(POLL_S)
        out.seek(0)
        output = out.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    return Took(time.perf_counter() - began_s, sum(seconds.values())), began_unix_s, output


def look(root: psutil.Process, seconds: dict[int, float]) -> None:
    """Note the CPU seconds of a process and all of its descendants, by process id."""
    try:
        for process in (root, *root.children(recursive=True)):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    except psutil.Error:
        return  # a process has just ended; keep its last figures


def first_token(run: Path) -> float:
    """The time of a finished run's first token, in Unix time."""
    store = open_store(str(run))
    manifest = read_manifest(store)
    assert manifest is not None
    times = []
    for table in read_results(store, objects=[unit.object for unit in manifest.units]):
        for row in table.select(["started_at", "prefill_s"]).to_pylist():
            times.append(row["started_at"].timestamp() + row["prefill_s"])
    return min(times)


def job(folder: Path, *options: str) -> Took:
    """A job of four prompts, from the command to its end."""
    run = folder / f"run-{time.monotonic_ns()}"
    command = ["run", str(folder / "job.yaml"), "--quiet", "--set", f"output.path={run}", *options]
    took, began_s, _ = measure(draftmill(*command))
    return Took(took.wall_s, took.cpu_s, first_token(run) - began_s)


def limit() -> Took:
    """The same work in a bare Python."""
    took, began_s, output = measure([sys.executable, "-c", LIMIT, str(BUILTIN / "ar-tiny")])
    times = [float(line) for line in output.splitlines() if line.replace(".", "", 1).isdigit()]
    return Took(took.wall_s, took.cpu_s, times[0] - began_s)


def draftmill(*arguments: str) -> list[str]:
    """The command line as a process."""
    return [sys.executable, "-m", "draftmill.jobs.cli", *arguments]


def write_job(folder: Path) -> None:
    """The prompts and the spec."""
    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "task": {"kind": "complete", "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt"}},
        "model": {"path": "builtin:ar-tiny", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run")},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {repeats}\n")
    print("| command | wall, s | CPU, s | first token, s | goal, wall |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder)
        spec, run = str(folder / "job.yaml"), str(folder / "run")
        measure(draftmill("run", spec, "--local", "--quiet"))  # writes byte code, and a run for `status`
        for title, once in {
            "--help": lambda: measure(draftmill("--help"))[0],
            "status": lambda: measure(draftmill("status", run))[0],
            "verify": lambda: measure(draftmill("verify", run))[0],
            "validate": lambda: measure(draftmill("validate", spec))[0],
            "job, Ray": lambda: job(folder),
            "job, --local": lambda: job(folder, "--local"),
            "limit: torch, transformers": limit,
        }.items():
            print(line(title, [once() for _ in range(repeats)]), flush=True)


def line(title: str, took: list[Took]) -> str:
    """A row of the table."""
    wall_s, cpu_s = (statistics.median(getattr(measured, name) for measured in took) for name in ("wall_s", "cpu_s"))
    firsts = [measured.first_token_s for measured in took if measured.first_token_s is not None]
    first = f"{statistics.median(firsts):.1f}" if firsts else "-"
    goal = f"{GOALS_S[title]:g}" if title in GOALS_S else "-"
    return f"| {title} | {wall_s:.1f} | {cpu_s:.1f} | {first} | {goal} |"


if __name__ == "__main__":
    main()
