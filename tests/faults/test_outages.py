"""An outage of the store in each phase of a job, and storms of faults: it ends complete, or is started again by its code.

Without Ray (tests/runs/local_pool.py). What the generated Slurm script and CronJob never retry are exit codes 2 and 3.

Without Ray (tests/runs/local_pool.py); rows, plan, results, traces and the lease all go through the same storm.
"""

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.exit_codes import INTERRUPTED, OK, UNEXPECTED, UNUSABLE
from draftmill.storage.errors import StoreError
from draftmill.storage.stores import s3
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import S3Options
from tests.runs.jobs_of_tests import rows_of, soak, unequal, write_rows, write_spec
from tests.runs.local_pool import without_ray
from tests.storage.stores.s3_server import S3Server

pytestmark = pytest.mark.s3

UNITS, UNIT_ROWS = 3, 2
PHASES = {
    "listing": ("GET", "prefix=rows"),
    "input": ("GET", "rows.jsonl"),
    "probe": ("PUT", "_probe"),
    "lease": ("PUT", "_lease.json"),
    "unit table": ("PUT", "/plan/"),
    "plan": ("PUT", "_plan.json"),
    "attempts": ("PUT", "/attempts/"),
    "read": ("GET", "/plan/"),
    "commit": ("PUT", "/data/"),
    "manifest": ("PUT", "_manifest.json"),
    "success": ("PUT", "_SUCCESS"),
}
"""The requests of each phase: method, and a part of the path or the query."""

KINDS = ("403", "500", "503", "reset", "lost")
BEST_EFFORT = {"attempts"}
NOTHING_WRITTEN = {"listing", "input", "probe", "lease", "unit table"}
PATIENT = {"read", "commit"}
"""Each unit is tried for two minutes before the job ends."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch):
    """Little time passes between the attempts of this process' clients."""
    monkeypatch.setattr(s3, "MAX_WAIT_S", 0.005)
    s3._client.cache_clear()
    yield
    s3._client.cache_clear()


class Bucket:
    """A job whose input and output are in a bucket."""

    def __init__(self, folder, server: S3Server, options: S3Options) -> None:
        url = f"s3://{server.new_bucket()}"
        self.folder, self.server = folder, server
        self.rows = write_rows(folder / "rows.jsonl", UNITS * UNIT_ROWS, longest=12)
        self.store = S3Store(f"{url}/run", options)
        inputs = S3Store(f"{url}/rows", options)
        inputs.put("rows.jsonl", self.rows.read_bytes())
        changes: dict = {
            "input": {"path": f"{inputs.url}/rows.jsonl", "columns": {"id": "id", "tokens": "tokens"}},
            "output": {"path": self.store.url, "unit_rows": UNIT_ROWS},
            "s3": {"endpoint": options.endpoint, "region": options.region},
        }
        self.spec = write_spec(folder, rows=self.rows, out="struck", **changes)

    def run(self) -> int:
        with without_ray():
            return main(["run", str(self.spec), "--quiet"])

    def check(self) -> None:
        """Every row is there once, with the text of a job without faults."""
        with without_ray():
            assert main(["run", str(write_spec(self.folder, rows=self.rows, out="calm")), "--quiet"]) == OK
        calm, found = rows_of(self.folder / "calm"), rows_of(self.store)
        same = [name for name in calm.column_names if name != "unit"]
        assert not unequal(found.sort_by("id").select(same), calm.sort_by("id").select(same))


def struck(server: S3Server, method: str, part: str) -> int:
    return sum(asked == method and part in path for asked, path in server.app.requests)


@pytest.mark.parametrize("kind", ["403", "500"])
@pytest.mark.parametrize("phase", [*(phase for phase in PHASES if phase not in PATIENT), *soak(PATIENT)])
@pytest.mark.slow
def test_after_an_outage_the_next_start_ends_the_job(tmp_path, s3_server, s3_options, impatient, phase, kind):
    bucket = Bucket(tmp_path, s3_server, s3_options)
    method, part = PHASES[phase]
    s3_server.fail(kind, method, part, times=10**6)
    code = bucket.run()
    assert struck(s3_server, method, part) > 1
    s3_server.calm()
    if phase in BEST_EFFORT:
        assert code == OK
    elif kind == "403" and phase in NOTHING_WRITTEN:
        assert code == UNUSABLE and [stat.name for stat in bucket.store.list()] == []
    else:
        assert code in {UNEXPECTED, INTERRUPTED}
    assert bucket.run() == OK
    bucket.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["403", *soak(KINDS[1:])])
@pytest.mark.parametrize("phase", ["input", *soak(PHASES.keys() - {"input"})])
def test_an_outage_of_some_seconds_is_borne_or_retried(tmp_path, s3_server, s3_options, kind, phase):
    bucket = Bucket(tmp_path, s3_server, s3_options)
    method, part = PHASES[phase]
    s3_server.fail(kind, method, part, times=10**6, seconds=5.0)
    code = bucket.run()
    assert struck(s3_server, method, part) > 1
    assert code in {OK, UNEXPECTED, INTERRUPTED}
    if kind == "403":
        assert code == OK  # a refusal is borne for longer than that
    assert code == OK or bucket.run() == OK
    bucket.check()


STORM_UNITS, STORM_ROWS = 12, 2
RATE = 0.2
TIMEOUT_S, STALL_S = 1.0, 1.5


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch):
    """Clients of this process wait a second for an answer, and little between their attempts."""
    monkeypatch.setattr(s3, "TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(s3, "MAX_WAIT_S", 0.2)
    s3._client.cache_clear()
    yield
    s3._client.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *soak(range(2, 22))])
def test_a_job_in_a_storm_of_faults_ends_complete_with_nothing_twice(tmp_path, s3_server, s3_options, hurried, seed):
    url = f"s3://{s3_server.new_bucket()}"
    rows = write_rows(tmp_path / "rows.jsonl", STORM_UNITS * STORM_ROWS, longest=12)
    inputs, store = S3Store(f"{url}/rows", s3_options), S3Store(f"{url}/run", s3_options)
    inputs.put("rows.jsonl", rows.read_bytes())
    changes = {
        "input": {"path": f"{inputs.url}/rows.jsonl", "columns": {"id": "id", "tokens": "tokens"}},
        "output": {"path": store.url, "unit_rows": STORM_ROWS, "trace": "steps"},
        "s3": {"endpoint": s3_options.endpoint, "region": s3_options.region},
    }
    storm = s3_server.rage(RATE, seed=seed, stall_s=STALL_S)
    with without_ray(workers=2):
        assert main(["run", str(write_spec(tmp_path, rows=rows, out="storm", **changes)), "--quiet"]) == 0
        s3_server.calm()
        assert main(["run", str(write_spec(tmp_path, rows=rows, out="calm")), "--quiet"]) == 0
    assert {"503", "500", "409", "reset", "lost", "cut", "stall"} >= set(storm.struck)
    # How many accesses there are, and which of them are struck, is chance: one storm in twenty had 14 faults of four kinds.
    assert storm.struck.total() >= 8 and len(storm.struck) >= 3
    calm = rows_of(tmp_path / "calm")
    found = rows_of(store)
    same = [name for name in calm.column_names if name != "unit"]  # units of four rows there
    assert not unequal(found.sort_by("id").select(same), calm.sort_by("id").select(same))
    for folder in ("data", "traces"):
        names = [stat.name.partition(".")[0] for stat in store.list(f"{folder}/")]  # a careless server's have suffixes
        assert names == [f"{folder}/unit-{unit:08d}" for unit in range(STORM_UNITS)]
    assert main(["verify", store.url, "--s3-endpoint", s3_server.endpoint]) == 0


def test_stalls_and_resets_do_not_outlast_a_stores_patience(s3_server, s3_options, hurried):
    store = S3Store(f"s3://{s3_server.new_bucket()}/run", s3_options, sleep=lambda _: None)
    s3_server.rage(1.0, seed=3, stall_s=0.0)
    with pytest.raises(StoreError):
        store.create("data/a", b"x")
    s3_server.calm()
    assert not store.exists("data/a") or store.get("data/a") == b"x"
