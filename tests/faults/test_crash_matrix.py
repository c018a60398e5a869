"""Killed with -9 at every named side effect, one after another, and resumed each time: no row is lost, none is there twice.

A process is the driver and its worker in one (tests/runs/local_pool.py), forked from a server that has imported everything, so
that a kill costs little more than loading the model. What kills workers alone, on a real Ray, is in test_crash.py.
"""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
from tests.runs.jobs_of_tests import forked, rows_of, write_rows, write_spec
from tests.runs.local_pool import without_ray
from tests.runs.test_sweep import KILLS  # and `draftmill sweep` there

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
