"""Drivers are killed, stopped and frozen at seeded moments and at every named side effect: nothing twice, nothing missing.

Drivers are forked from a server that has imported everything already, so that a round costs little more than loading the model:
at seeded moments beside workers on the session's Ray, at side effects with the worker in their own process
(tests/runs/local_pool.py). Only processes that were started here are killed.
"""

import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.drive import leases
from draftmill.storage.failpoints import VARIABLE
from draftmill.storage.runs.lease import LEASE
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import S3Options, Store, open_store
from tests.jobs.results.test_measure import POINTS  # `draftmill measure` is killed there
from tests.jobs.run.recurring_jobs import KILLS as RECURRING  # recurring jobs there
from tests.runs.jobs_of_tests import forked, rows_of, soak, unequal, write_rows, write_spec
from tests.runs.local_pool import without_ray
from tests.runs.test_sweep import KILLS  # and `draftmill sweep` there

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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


@pytest.mark.ray
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


@pytest.mark.ray
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


@pytest.mark.ray
def test_a_second_driver_is_told_who_holds_the_run_and_exits_with_4(crashes):
    spec, run = crashes.job("shared", workers={"count": 1}, batching={"max_rows": 1})
    first = crashes.start(spec)
    assert reached(first, run / "data", 1)
    second = crashes.start(spec)
    second.join(60)
    assert second.exitcode == 4
    assert f":{first.pid}, until" in Path(f"{spec}.log").read_text()
    end_driver(signal.SIGKILL, first, crashes.rng)


ROOT = Path(__file__).parents[2]
UNITS, UNIT_ROWS = 16, 2

LOCAL = (
    *("lease.before_acquire", "plan.before_part", "plan.before_plan", "lease.before_renew"),
    *("worker.open_unit", "worker.step", "worker.close_unit", "commit.before_trace", "commit.before_data"),
    *(
        "local.before_link:3",
        "local.before_link:4",
        "local.after_link:2",
        "local.after_link:3",
        "local.before_rename:2",
    ),
    *("commit.after_data", "worker.committed", "driver.receipt", "driver.receipt:2", "worker.step:3"),
    *("commit.before_manifest", "local.before_link:3", "commit.before_success", "local.after_link:2"),
)
"""Point or point:hit, in the order of the kills. The first creations of a process are those of the probe."""

S3 = ("s3.before_put", "s3.before_create:4", "s3.after_create:3", "s3.before_replace")


def run_here(spec: str, points: str, log: str) -> None:
    """What a process does: `draftmill run` without Ray, with a lease that is renewed all the time."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 2)
    os.environ[VARIABLE] = points
    leases.RENEWALS_PER_TTL = 1200
    with without_ray():
        sys.exit(main(["run", spec, "--quiet", "--debug"]))


@dataclass(frozen=True)
class Matrix:
    """A folder with rows and what they give undisturbed."""

    folder: Path
    rows: Path
    expected: pa.Table

    def process(self, spec: Path, *points: str) -> int:
        """Run the job with these failpoints (`name=action...`); returns the exit code."""
        process = forked(run_here, str(spec), ",".join(points), f"{spec}.log")
        process.join(120)
        assert process.exitcode is not None, f"{points}: hangs"
        return process.exitcode

    def kill_at(self, spec: Path, points) -> None:
        """Kill a process at each of the points, in turn, and let the last one finish."""
        for point in points:
            name, _, hit = point.partition(":")
            code = self.process(spec, f"{name}=kill:{hit or 1}")
            assert code == -signal.SIGKILL, f"{point}: exit code {code}\n{Path(f'{spec}.log').read_text()}"
        assert self.process(spec) == 0, Path(f"{spec}.log").read_text()

    def spec(self, name: str, **changes: object) -> Path:
        """A spec of the job with a run directory of its own."""
        output = {"path": str(self.folder / name), "unit_rows": UNIT_ROWS, "trace": "steps"}
        return write_spec(self.folder, rows=self.rows, out=name, **({"output": output} | changes))

    def on_s3(self, name: str, bucket: str, options: S3Options) -> tuple[Path, S3Store]:
        """The same on S3: the spec and the store."""
        url = f"s3://{bucket}/{name}"
        output = {"path": url, "unit_rows": UNIT_ROWS, "trace": "steps"}
        spec = self.spec(name, output=output, s3={"endpoint": options.endpoint, "region": options.region})
        return spec, S3Store(url, options)

    def check(self, store: Store, *arguments: str) -> None:
        assert rows_of(store).equals(self.expected)
        assert main(["verify", store.url, *arguments]) == 0


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("matrix")
    rows = write_rows(folder / "rows.jsonl", UNITS * UNIT_ROWS, longest=12)
    spec = write_spec(folder, rows=rows, out="undisturbed", output={"path": str(folder / "u"), "unit_rows": UNIT_ROWS})
    with without_ray():
        assert main(["run", str(spec), "--quiet"]) == 0
    return Matrix(folder, rows, rows_of(folder / "u"))


def test_killed_at_every_side_effect_on_disk_the_rows_are_the_same(matrix):
    spec = matrix.spec("chain")
    matrix.kill_at(spec, LOCAL)
    matrix.check(open_store(str(matrix.folder / "chain")))


@pytest.mark.s3
def test_killed_at_every_side_effect_on_s3_the_rows_are_the_same(matrix, s3_server, s3_options):
    spec, store = matrix.on_s3("chain-s3", s3_server.new_bucket(), s3_options)
    matrix.kill_at(spec, S3)
    matrix.check(store, "--s3-endpoint", s3_server.endpoint)


@pytest.mark.parametrize("point", ["plan.before_plan", "commit.before_manifest"])
def test_sigterm_outside_of_decoding_ends_with_4_too_and_gives_the_lease_back(matrix, point):
    spec, run = matrix.spec(f"term-{point}"), matrix.folder / f"term-{point}"
    process = forked(run_here, str(spec), f"{point}=sleep:1:60", f"{spec}.log")
    last = run / "data" / f"unit-{UNITS - 1:08d}.parquet" if point.startswith("commit") else run / "plan"
    while not last.exists() or not list(run.glob("plan/*.parquet")):
        assert process.is_alive()
        time.sleep(0.005)  # the condition is polled, not assumed
    for _ in range(15):  # one that comes while the loop ends lets it end: there is nothing left to drain
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(3)
        if process.exitcode is not None:
            break
    assert process.exitcode == 4, Path(f"{spec}.log").read_text()
    assert b'"expires_at_s": 0' in (run / LEASE).read_bytes()
    assert not (run / "_manifest.json").exists()
    assert matrix.process(spec) == 0
    matrix.check(open_store(str(run)))


@pytest.mark.soak
@pytest.mark.parametrize("hit", [1, 2, 5])
@pytest.mark.parametrize("point", sorted({point.partition(":")[0] for point in LOCAL}))
def test_killed_again_and_again_at_one_side_effect_the_rows_are_the_same(matrix, point, hit):
    spec = matrix.spec(f"soak-{point}-{hit}")
    for _ in range(3):
        assert matrix.process(spec, f"{point}=kill:{hit}") in {0, -signal.SIGKILL}
    assert matrix.process(spec) == 0
    matrix.check(open_store(str(matrix.folder / f"soak-{point}-{hit}")))


def test_the_matrix_has_every_failpoint_of_the_source():
    named = set()
    for package in ("jobs", "actors", "decoders", "storage"):
        for path in (ROOT / package).rglob("*.py"):
            named |= set(re.findall(r'\bfailpoint\("([\w.]+)"\)', path.read_text()))
    elsewhere = (*POINTS, *KILLS, *RECURRING)
    assert named == {point.partition(":")[0] for point in (*LOCAL, *S3, *elsewhere)}


@pytest.mark.parametrize("point", ["plan.before_plan", "commit.before_manifest"])
def test_a_full_disk_or_another_error_of_a_write_ends_the_run_and_the_next_one_finishes_it(matrix, point):
    spec = matrix.spec(f"raise-{point}")
    assert matrix.process(spec, f"{point}=raise") == 1
    store = open_store(str(matrix.folder / f"raise-{point}"))
    assert b'"expires_at_s": 0' in store.get(LEASE), "the lease is given back"
    assert matrix.process(spec) == 0
    matrix.check(store)
