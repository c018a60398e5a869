"""Killed, stopped and frozen at seeded moments on a real Ray: byte-identical rows, nothing twice, nothing missing.

Drivers and workers are real processes. Drivers are forked from a server that has imported everything already and join the
session's Ray, so that a round costs little more than loading the model. Only processes that were started here are killed.
"""

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from tests.runs.jobs_of_tests import forked, rows_of, soak, unequal, write_rows, write_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 48
STALL_S = 10.0
"""Longer than any worker here takes for a step, on a machine that has much else to do."""


def drive(address: str, spec: str, log: str) -> None:
    """What a driver process does: `draftmill run` on the session's Ray."""
    import ray

    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    sys.exit(main(["run", spec, "--debug", "--quiet"]))


class Crashes:
    """Starts drivers on one run directory after another, and kills."""

    def __init__(self, address: str, folder: Path, rows: Path) -> None:
        self.address = address
        self.folder = folder
        self.rows = rows
        self.rng = random.Random()
        self.counted = 0

    def job(self, name: str, **changes: object) -> tuple[Path, Path]:
        """A fresh run directory: (spec, directory)."""
        return write_spec(self.folder, rows=self.rows, out=name, **changes), self.folder / name

    def start(self, spec: Path) -> ForkServerProcess:
        return forked(drive, self.address, str(spec), f"{spec}.log")

    def finish(self, spec: Path) -> None:
        process = self.start(spec)
        process.join(120)
        assert process.exitcode == 0, Path(f"{spec}.log").read_text()


@pytest.fixture(scope="module")
def crashes(ray_session, tmp_path_factory: pytest.TempPathFactory) -> Crashes:
    folder = tmp_path_factory.mktemp("crash")
    address = ray_session.get_runtime_context().gcs_address
    return Crashes(address, folder, write_rows(folder / "rows.jsonl", ROWS, longest=40))


@pytest.fixture(scope="module")
def expected(crashes: Crashes) -> pa.Table:
    """The rows of a run that nothing disturbed."""
    spec, run = crashes.job("undisturbed")
    crashes.finish(spec)
    return rows_of(run)


def num_files(run: Path) -> int:
    return sum(1 for path in run.rglob("*") if path.is_file())


def reached(process: ForkServerProcess, run: Path, files: int) -> bool:
    """Wait until the run directory has so many files; false if the driver ended before."""
    while process.is_alive():
        if num_files(run) >= files:
            return True
        time.sleep(0.002)  # the condition is polled, not assumed
    return False


def workers() -> list[psutil.Process]:
    """The decoding processes of this session's Ray, which are our descendants."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "ray::DecodeWorker" in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


Round = Callable[[ForkServerProcess, random.Random], int]


def end_driver(number: signal.Signals, process: ForkServerProcess, rng: random.Random) -> int:
    """Send it and wait; 1 if it ended of it, 0 if it had finished."""
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode in {0, 4, -signal.SIGKILL}
    return int(process.exitcode != 0)


def signal_worker(number: signal.Signals, process: ForkServerProcess, rng: random.Random) -> int:
    """Of SIGSTOP it says nothing any more: after STALL_S it is killed, and its units are given to others."""
    alive = workers()
    if not alive:
        return 0
    rng.choice(sorted(alive, key=lambda worker: worker.pid)).send_signal(number)
    return 1


ROUNDS: dict[str, tuple[Round, int]] = {
    "driver": (partial(end_driver, signal.SIGKILL), 9),
    "worker": (partial(signal_worker, signal.SIGKILL), 8),
    "sigterm": (partial(end_driver, signal.SIGTERM), 2),
    "frozen": (partial(signal_worker, signal.SIGSTOP), 1),
}
"""Who ends, and how often for each seed; `make soak` takes ten seeds."""


def disturb(crashes: Crashes, name: str, kill: Round, kills: int) -> Path:
    """Run a job to its end with kills at seeded counts of files; returns its directory. Adds the kills to `crashes`."""
    spec, run = crashes.job(name, workers={"stall_s": STALL_S if kill is ROUNDS["frozen"][0] else 600.0})
    done, files = 0, 0
    process = crashes.start(spec)
    while done < kills:
        files = max(files, num_files(run)) + crashes.rng.randint(1, 4)
        if not reached(process, run, files):
            break
        done += kill(process, crashes.rng)
        if not process.is_alive():
            process = crashes.start(spec)
    process.join(120)
    assert process.exitcode == 0, Path(f"{spec}.log").read_text()
    crashes.counted = done
    return run


@pytest.mark.parametrize("who", list(ROUNDS))
@pytest.mark.parametrize("seed", [7, *soak(range(8, 17))])
def test_a_killed_job_resumes_to_byte_identical_rows(crashes, expected, who, seed):
    crashes.rng = random.Random(seed)
    kill, rounds = ROUNDS[who]
    total = 0
    for number in range(rounds + 9):
        run = disturb(crashes, f"{who}-{seed}-{number}", kill, kills=min(4, rounds - total))
        total += crashes.counted
        assert not unequal(rows_of(run), expected)
        assert main(["verify", str(run)]) == 0
        if total >= rounds:
            return
    raise AssertionError(f"only {total} of {rounds} hit a running job")


def test_sigterm_lets_running_units_finish_and_exits_with_4(crashes, expected):
    spec, run = crashes.job("terminated", workers={"count": 1}, batching={"max_rows": 1})
    process = crashes.start(spec)
    assert process.pid is not None and reached(process, run / "data", 1)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 4 and not (run / "_SUCCESS").exists()
    assert "run it again to resume" in Path(f"{spec}.log").read_text()
    assert main(["status", str(run)]) == 0
    crashes.finish(crashes.job("terminated")[0])  # more workers and rows at once: the same job
    assert rows_of(run).equals(expected)


def test_a_second_driver_is_told_who_holds_the_run_and_exits_with_4(crashes):
    spec, run = crashes.job("shared", workers={"count": 1}, batching={"max_rows": 1})
    first = crashes.start(spec)
    assert reached(first, run / "data", 1)
    second = crashes.start(spec)
    second.join(60)
    assert second.exitcode == 4
    assert f":{first.pid}, until" in Path(f"{spec}.log").read_text()
    end_driver(signal.SIGKILL, first, crashes.rng)
