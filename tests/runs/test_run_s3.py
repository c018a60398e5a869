"""Whole jobs whose run directory, and rows, are on S3: the same results as on disk, whatever the network does.

The workers are processes of Ray: they find their credentials in the environment and the server by `s3.endpoint`.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.storage.runs.commit import SUCCESS, read_manifest
from draftmill.storage.stores.s3 import ATTEMPTS, S3Store
from draftmill.storage.stores.store import S3Options
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec
from tests.storage.stores.s3_server import S3Server

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.slow]

ROWS, UNITS = 24, 6
ALWAYS = 10**9


@dataclass(frozen=True)
class Job:
    """One job, which any test may run into a prefix of its own; `expected` is what it gives on local disk."""

    folder: Path
    rows: Path
    expected: pa.Table
    bucket: str
    options: S3Options

    def spec(self, name: str, **changes: object) -> tuple[Path, S3Store]:
        """A spec that writes to `name` in the bucket, and the store there."""
        url = f"s3://{self.bucket}/{name}"
        sections = {
            "output": {"path": url, "unit_rows": ROWS // UNITS, "trace": "steps"},
            "s3": {"endpoint": self.options.endpoint, "region": self.options.region},
        }
        return write_spec(self.folder, rows=self.rows, out=name, **sections | changes), S3Store(url, self.options)

    def verify(self, store: S3Store) -> int:
        """The exit code of `draftmill verify`, which has the server's address from its own argument."""
        return main(["verify", store.url, "--s3-endpoint", str(self.options.endpoint)])


@pytest.fixture(scope="module")
def job(ray_session, s3_session: S3Server, s3_options: S3Options, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("s3")
    rows = write_rows(folder / "rows.jsonl", ROWS)
    spec = write_spec(folder, rows=rows, output={"path": str(folder / "run"), "unit_rows": ROWS // UNITS})
    assert main(["run", str(spec), "--quiet"]) == 0
    return Job(folder, rows, rows_of(folder / "run"), s3_session.new_bucket(), s3_options)


@pytest.fixture(scope="module")
def finished(job: Job) -> tuple[Path, S3Store]:
    spec, store = job.spec("finished")
    assert main(["run", str(spec), "--quiet"]) == 0
    return spec, store


def names(store: S3Store, prefix: str = "") -> list[str]:
    return [stat.name for stat in store.list(prefix)]


def unit_files(folder: str) -> list[str]:
    return [f"{folder}/unit-{unit:08d}.parquet" for unit in range(UNITS)]


def test_a_run_on_s3_is_complete_and_has_the_rows_of_a_run_on_disk(job, finished, s3_server, capsys):
    _, store = finished
    assert rows_of(store).equals(job.expected)
    assert names(store, "data/") == unit_files("data") and names(store, "traces/") == unit_files("traces")
    assert store.exists(SUCCESS) and not names(store, "_probe")
    assert job.verify(store) == 0
    assert "all promises hold" in capsys.readouterr().out
    assert main(["status", store.url, "--s3-endpoint", s3_server.endpoint]) == 0
    assert f"{UNITS} done, 0 running, 0 to go" in capsys.readouterr().out


def test_a_units_facts_are_in_its_metadata_and_no_credentials_are_anywhere(finished):
    _, store = finished
    manifest = read_manifest(store)
    assert manifest is not None
    for unit in manifest.units:
        stat = store.stat(unit.object)
        assert stat is not None and stat.etag == unit.etag
        assert (stat.metadata["sha256"], stat.metadata["fingerprint"]) == (unit.sha256, manifest.fingerprint)
    assert not [name for name in names(store) if b"test-secret" in store.get(name)]


def test_a_finished_run_says_so_and_writes_and_deletes_nothing(finished, s3_server, capsys):
    spec, store = finished
    before = list(store.list())
    s3_server.app.requests.clear()
    assert main(["run", str(spec)]) == 0
    assert {method for method, _ in s3_server.app.requests} <= {"GET", "HEAD"}
    assert list(store.list()) == before
    assert f"{store.url} is already finished" in capsys.readouterr().out


def test_rows_are_read_from_s3_packed_lines_and_tables_alike(job):
    lines = job.rows.read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    table = pa.Table.from_pylist([json.loads(line) for line in lines[half:]])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    inputs = S3Store(f"s3://{job.bucket}/rows", job.options)
    inputs.put("first.jsonl.gz", gzip.compress(b"".join(lines[:half])))
    inputs.put("second.parquet", sink.getvalue().to_pybytes())
    columns = {"id": "id", "tokens": "tokens"}
    spec, store = job.spec("from-s3", input={"path": f"{inputs.url}/*", "columns": columns})
    assert main(["run", str(spec), "--quiet"]) == 0
    assert rows_of(store).equals(job.expected)
    assert job.verify(store) == 0
    assert names(inputs) == ["first.jsonl.gz", "second.parquet"]


def test_lost_answers_slow_downs_and_broken_bodies_spoil_nothing(job, s3_server):
    # As many answers as a writer has patience for: a twin, or the unit's next attempt, finds the file there.
    s3_server.fail("lost", part=unit_files("data")[-1], times=ATTEMPTS)
    s3_server.fail("lost", part="/data/", times=2, every=2)
    s3_server.fail("lost", part="/_", times=2, every=2)
    s3_server.fail("503", times=4, every=3)
    s3_server.fail("reset", times=2, every=4)
    s3_server.fail("cut", method="GET", part="/plan/")
    s3_server.fail("503", method="GET", times=3, every=3)
    s3_server.fail("500", method="HEAD", times=3, every=2)
    spec, store = job.spec("faulty")
    assert main(["run", str(spec), "--quiet"]) == 0
    assert [fault.times for fault in s3_server.app.faults] == [0] * 8, "every fault has struck"
    s3_server.calm()
    assert rows_of(store).equals(job.expected)
    assert names(store, "data/") == unit_files("data")
    assert job.verify(store) == 0


def test_a_store_that_ignores_conditions_is_refused(job, s3_server, capsys):
    s3_server.fail("ignore_conditions", times=ALWAYS)
    spec, store = job.spec("careless")
    assert main(["run", str(spec)]) == 2
    assert f"output.path: {store.url}: this store ignores conditional writes" in capsys.readouterr().err
    assert not names(store)
