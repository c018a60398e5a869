"""Everything that only a GPU can tell, in three commands of less than ten minutes each.

    python -m benchmarks.device right    is it right? texts beside those of the CPU (device_right.py)
    python -m benchmarks.device step     where does a step go? steps and kernels beside their rooflines (device_step.py)
    python -m benchmarks.device job      how fast is a job? streams of requests, memory, other software (device_job.py)
    python -m benchmarks.device expect --expected FILE     before, on any machine: writes the CPU's texts, which
                                                           `right --expected FILE` reads
    python -m benchmarks.device right --rehearse           in small on the CPU: shows that it runs, measures nothing
    python -m benchmarks.device right --case "assd, fused" --case logits     some cases only
    python -m benchmarks.device --case logits              in this process, under a debugger, say

`step` and `job` take about 60 GiB of GPU memory. Models have builtin or random weights (device_models.py): nothing is downloaded.
Needed are torch, transformers, Triton and pydantic, but nothing that reads data or stores results.

Each case runs in a process of its own, with a time limit: what one does to the device ends no other. A case that dies or hangs
runs once more with CUDA_LAUNCH_BLOCKING=1, which names the operation that fails (its times mean nothing), and the last lines of
its output stand in the report. The report, in Markdown, is written after each case. On a GPU `right` runs up to eight processes
at a time, each with up to three cases; in a rehearsal one process runs all.

A process prints a line of JSON after each row: the case and all its rows so far. The last one of a case counts.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import device_job, device_right, device_step
from benchmarks.device_models import Bench, Case, Row
from draftmill.actors.loop.device_facts import device_facts
from draftmill.decoders.kernels.find import find_attention, find_product, noting
from tests.device.steps import made

NO_GPU: Final = "this machine has no usable GPU; --rehearse runs all cases in small on the CPU"
COMMANDS: Final = {"right": device_right, "step": device_step, "job": device_job}
_TAIL: Final = 50
_LEAST_S: Final = 5.0
_ERROR: Final = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b")
_FACTS: Final = "The device"


def facts(bench: Bench) -> Iterator[Row]:
    """What computes here, as far as results or speed depend on it."""
    found: dict[str, Any] = device_facts(made("autoregressive", {}, str(bench.device), dtype=str(bench.dtype)[6:]))
    kernels = dict(found.pop("kernels", {}))
    for name, heads, key_heads, width in (("Llama-8B", 32, 8, 128), ("XLNet-110M", 12, 12, 64)):
        more = {"relative": name == "XLNet-110M"}
        with noting() as verdicts:
            find_attention(bench.device, bench.dtype, num_heads=heads, key_heads=key_heads, width=width, **more)
        kernels[f"attention, {name}"] = verdicts["attention"]
    with noting() as verdicts:
        find_product(bench.device, bench.dtype)
    kernels["experts"] = verdicts["experts"]
    found |= {"cuda": torch.version.cuda, **{f"kernel: {name}": verdict for name, verdict in kernels.items()}}
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    found["copies, TB/s"] = f"{bench.bytes_per_ms / 1e9:.2f}"
    for name, value in found.items():
        yield _FACTS, [name, str(value)]


def cases_of(command: str) -> list[Case]:
    """The cases of a command; the first one asks what the device is."""
    return [Case("facts", _FACTS, facts), *COMMANDS[command].CASES]


# ---- a process that runs cases ---------------------------------------------------------------------------------------


def run_here(cases: Sequence[Case], bench: Bench) -> None:
    """Run cases in this process; the first exception ends it, since the device may be lost."""
    faulthandler.register(signal.SIGUSR1)
    for case in cases:
        rows = list[Row]()
        for row in case.find(bench):
            rows.append(row)
            print(json.dumps({"case": case.name, "rows": rows}), flush=True)
        print(json.dumps({"case": case.name, "rows": rows, "done": True}), flush=True)


@dataclass(slots=True)
class Ended:
    """How a process ended: why it failed, if it did; the rows that its cases gave, and which cases are done; its last lines."""

    why: str | None = None
    rows: dict[str, list[Row]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    tail: str = ""


def run_apart(
    cases: Sequence[Case], folder: Path, seconds: float, *, options: Sequence[str], blocking: bool = False
) -> Ended:
    """Run cases in another process with these options; it is killed after so many seconds with all that it started."""
    first = cases[0]
    command = [*first.command, sys.executable, "-u", "-m", "benchmarks.device", *options]
    command += [word for case in cases for word in ("--case", case.name)]
    own = {name: value.format(folder=folder) for name, value in first.env.items()}
    environment = os.environ | own | ({"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {})
    with tempfile.TemporaryFile("w+", dir=folder, encoding="utf-8", errors="replace") as output:
        where: dict[str, Any] = {"cwd": Path(__file__).parents[1], "env": environment, "start_new_session": True}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **where)
        code = _wait(process, seconds)
        output.seek(0)
        ended = _read(output)
    if code is None:
        ended.why = f"took more than {round(seconds, 1):g} s"
    elif code < 0:
        ended.why = f"died by {signal.Signals(-code).name}"
    elif code or any(case.name not in ended.done for case in cases):
        errors = [line for line in ended.tail.splitlines() if _ERROR.match(line)]
        ended.why = errors[-1][:200] if errors else f"exit code {code}"
    if ended.why and len(ended.done) == len(cases):  # all rows came, but the process did not end as it should
        ended.done.discard(cases[-1].name)
    return ended


def _wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """The exit code; None if it had to be killed. Before, it prints where it is (`run_here`)."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(lines: Iterable[str]) -> Ended:
    ended, others = Ended(), deque[str](maxlen=_TAIL)
    for line in lines:
        try:
            found = json.loads(line) if line.startswith('{"case"') else None
        except ValueError:  # it was killed in the middle of the line
            found = None
        if found is None:
            others.append(line.rstrip())
        else:
            ended.rows[found["case"]] = [(title, cells) for title, cells in found["rows"]]
            ended.done |= {found["case"]} if "done" in found else set()
    ended.tail = "\n".join(others)
    return ended


# ---- all cases of a command ------------------------------------------------------------------------------------------


class Report:
    """The tables of a command, in the order of its cases, and what is known of those that failed; written after each case."""

    def __init__(self, command: str, cases: Sequence[Case], output: Path) -> None:
        self._command, self._cases, self._output = command, cases, output
        self._columns = {_FACTS: "what | found", **COMMANDS[command].COLUMNS}
        self._rows = dict[str, list[Row]]()
        self._failures = list[str]()
        self._lock = threading.Lock()

    def add(self, case: Case, rows: Sequence[Row], note: str = "", failures: Sequence[Ended] = ()) -> None:
        """Note the rows of a case; `note` says what is wrong with it, `failures` are the processes in which it failed."""
        with self._lock:
            self._rows[case.name] = [*rows, *([(case.table, [case.name, note])] if note else [])]
            for ended, how in zip(failures, ("", ", with CUDA_LAUNCH_BLOCKING=1"), strict=False):
                self._failures.append(f"### {case.name}{how}: {ended.why}\n\n```text\n{ended.tail}\n```\n")
            print(f"{case.name}: {note or 'done'}", flush=True)
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(str(self), encoding="utf-8")

    def __str__(self) -> str:
        """In Markdown."""
        parts = [f"# python -m benchmarks.device {self._command}\n"]
        for title, heads in self._columns.items():
            columns = heads.split(" | ")
            found = [row for case in self._cases for table, row in self._rows.get(case.name, ()) if table == title]
            full = [columns, ["---"] * len(columns), *(row + ["-"] * (len(columns) - len(row)) for row in found)]
            lines = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in full]
            parts += ["\n".join([f"## {title}", "", *lines, ""])] if found else []
        return "\n".join([*parts, *(["## Failures\n"] if self._failures else []), *self._failures])


def run_all(
    cases: Sequence[Case],
    report: Report,
    *,
    seconds: float,
    options: Sequence[str] = (),
    at_once: int = 1,
    together: int = 1,
) -> None:
    """Run cases in processes with these options, `at_once` of them at a time and `together` in each, until the time is up."""
    ends_at = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as pool:
        alike = (list(some) for _, some in itertools.groupby(cases, key=lambda case: (case.command, case.env)))
        parts = [some[at : at + together] for some in alike for at in range(0, len(some), together)]
        run = partial(_run_part, report=report, folder=Path(name), ends_at=ends_at, options=options)
        list(pool.map(run, parts))


def _run_part(part: list[Case], report: Report, folder: Path, ends_at: float, *, options: Sequence[str]) -> None:
    """Run these cases in one process; if one fails, it once more, and those after it in another process."""
    while part:
        left_s = ends_at - time.monotonic()
        missing = next((case.command[0] for case in part if case.command and not shutil.which(case.command[0])), None)
        if missing or left_s < _LEAST_S:
            for case in part:
                report.add(case, [], f"{missing} is not installed" if missing else "no time left")
            return
        limit_s = min(left_s, sum(case.limit_s for case in part))
        ended = run_apart(part, folder, limit_s, options=options)
        for case in part:
            if case.name in ended.done:
                report.add(case, ended.rows[case.name])
        part = [case for case in part if case.name not in ended.done]
        if part:
            failed, *part = part
            _run_again(failed, ended, report, folder, ends_at, options=options)


def _run_again(
    case: Case, first: Ended, report: Report, folder: Path, ends_at: float, *, options: Sequence[str]
) -> None:
    left_s = ends_at - time.monotonic()
    if left_s < _LEAST_S:
        report.add(case, first.rows.get(case.name, []), f"failed: {first.why}; no time left to run it again", [first])
        return
    again = run_apart([case], folder, min(left_s, case.limit_s), options=options, blocking=True)
    rows = max((one.rows.get(case.name, []) for one in (again, first)), key=len)
    now = again.why or "it runs"
    note = f"failed: {first.why}; with CUDA_LAUNCH_BLOCKING=1: {now}"
    report.add(case, rows, note, [first, again] if again.why else [first])


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="what only a GPU can tell", allow_abbrev=False)
    parser.add_argument("command", nargs="?", choices=[*COMMANDS, "expect"])
    parser.add_argument("--rehearse", action="store_true", help="all cases in small on the CPU")
    parser.add_argument("--case", action="append", help="this one only (repeatable); without a command in this process")
    parser.add_argument("--minutes", type=float, default=9.0, help="what has not ended then is ended")
    parser.add_argument(
        "--expected", type=Path, help="the texts of the CPU: `expect` writes the file, `right` reads it"
    )
    parser.add_argument("--output", type=Path, help="the report; default: runs/device-COMMAND.md")
    flags = parser.parse_args(arguments)
    if flags.command == "expect":
        if flags.expected is None:
            parser.error("expect: --expected FILE is needed")
        return flags
    if flags.expected and not flags.expected.is_file():
        parser.error(f"--expected: {flags.expected} is not there; `python -m benchmarks.device expect` writes it")
    commands = [flags.command] if flags.command else list(COMMANDS)
    known = {case.name: case for command in commands for case in cases_of(command)}
    if not (flags.command or flags.case):
        parser.error(f"one of {', '.join(COMMANDS)} is needed, or --case")
    for name in flags.case or ():
        if name not in known:
            parser.error(f"--case: {name!r} is not known; allowed: {', '.join(known)}")
    chosen = flags.case or [name for name, case in known.items() if case.rehearsed or not flags.rehearse]
    # A report always says what it is about.
    flags.cases = [known[name] for name in dict.fromkeys([*(["facts"] if flags.command else []), *chosen])]
    flags.output = flags.output or Path(f"runs/device-{flags.command}.md")
    return flags


def main(arguments: list[str] | None = None) -> None:
    """Run a command's cases in processes, or, without a command, cases in this process."""
    flags = parse(arguments)
    if flags.command == "expect":
        device_right.write_expected(flags.expected, Bench(rehearse=flags.rehearse), flags.case or ())
        return
    if not flags.rehearse and not torch.cuda.is_available():
        sys.exit(NO_GPU)
    if flags.command is None:
        run_here(flags.cases, Bench(rehearse=flags.rehearse, expected=flags.expected))
        return
    report, at_once, together = Report(flags.command, flags.cases, flags.output), 1, 1
    options = ["--rehearse"] if flags.rehearse else []
    options += ["--expected", str(flags.expected.resolve())] if flags.expected else []
    if flags.rehearse:
        together = len(flags.cases)
    elif flags.command == "right":  # what measures time has the machine for itself
        at_once, together = max(1, min(8, (os.cpu_count() or 1) // 2)), 3
        os.environ.setdefault("OMP_NUM_THREADS", "2")
    seconds = 60 * flags.minutes
    run_all(flags.cases, report, seconds=seconds, options=options, at_once=at_once, together=together)
    print(f"\n{report}")


if __name__ == "__main__":
    main()
