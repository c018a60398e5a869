"""`run --local`: one worker in the driver's own process, without Ray, and the same rows."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from threading import Barrier

import pytest
from ray._private.node import Node

from draftmill.actors.job import WorkerResources
from draftmill.jobs.cli import main
from draftmill.jobs.drive import ray_session
from draftmill.jobs.drive.allocation import fitting_threads
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.run import session
from draftmill.storage.errors import StoreError
from draftmill.storage.failpoints import FailpointError, reset_failpoints
from draftmill.storage.runs.commit import done_units
from draftmill.storage.runs.unit_facts import CommittedUnit, unit_name
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import S3_DEFAULTS, Place, open_store
from tests.runs.jobs_of_tests import rows_of, unequal, write_rows, write_spec
from tests.runs.local_pool import without_ray


def test_a_local_run_has_the_rows_and_the_fingerprint_of_any_other(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    specs = [write_spec(tmp_path, rows=rows, out=name) for name in ("local", "other")]
    assert main(["run", str(specs[0]), "--local", "--quiet"]) == 0
    with without_ray(workers=2):
        assert main(["run", str(specs[1]), "--quiet"]) == 0
    assert unequal(rows_of(tmp_path / "local"), rows_of(tmp_path / "other")) == []
    plans = [(tmp_path / name / "_plan.json").read_text() for name in ("local", "other")]
    fingerprints = [next(line for line in plan.splitlines() if '"fingerprint"' in line) for plan in plans]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.slow
def test_a_local_run_needs_no_ray_and_says_so_where_more_is_asked_for(tmp_path, capsys):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 4))
    for key, message in {
        "workers.count=2": "workers.count: 2, but --local is one process",
        "workers.gpus=2": "workers.gpus: 2, but --local is one process with one GPU at most",
    }.items():
        assert main(["run", str(spec), "--local", "--quiet", "--set", key]) == 2
        assert message in capsys.readouterr().err
    assert main(["run", str(spec), "--local", "--quiet", "--ray-address", "127.0.0.1:1"]) == 2
    assert "--local runs without Ray" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    code = "import sys; from draftmill.jobs.cli import main; code = main(sys.argv[1:]); sys.exit('ray' in sys.modules or code)"
    command = [sys.executable, "-c", code, "run", str(spec), "--local", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_signal_ends_a_local_run_with_code_4_and_another_run_goes_on(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 48, longest=40)
    spec = write_spec(tmp_path, rows=rows, batching={"max_rows": 1})
    command = [
        sys.executable,
        "-m",
        "draftmill.jobs.cli",
        "run",
        str(spec),
        "--local",
        "--quiet",
        "--grace-seconds",
        "5",
    ]
    slow = os.environ | {"DRAFTMILL_FAILPOINTS": "worker.step=sleep:60:6"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow)
    deadline_s = time.monotonic() + 120
    while (
        time.monotonic() < deadline_s
        and not list((tmp_path / "run" / "data").glob("unit-*"))
        and process.poll() is None
    ):
        time.sleep(0.01)  # the condition is polled, not assumed
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 4 and "run it again to resume" in err, err
    with without_ray():
        assert main(["run", str(spec), "--quiet"]) == 0
    assert rows_of(tmp_path / "run").num_rows == 48


class Reads:
    """The bytes that were read of results, while it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        for kind, verb in ((LocalStore, "get"), (LocalStore, "get_range"), (S3Store, "_read")):
            monkeypatch.setattr(kind, verb, self._counted(getattr(kind, verb)))

    def _counted(self, read):
        def counted(store: object, name: str, *arguments, **more) -> bytes:
            data = read(store, name, *arguments, **more)
            self.bytes += len(data) if name.startswith("data/") else 0
            return data

        return counted


@pytest.mark.parametrize("kind", ["local disk", "without locks", pytest.param("s3", marks=pytest.mark.s3)])
def test_results_of_units_that_are_done_are_not_read_again(kind, tmp_path, request, monkeypatch, capsys):
    url, options = str(tmp_path / "run"), None
    more: dict = {}
    if kind == "s3":
        url, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
        more["s3"] = {"endpoint": options.endpoint, "region": options.region}
    if kind == "without locks":
        monkeypatch.setattr("fcntl.flock", no_locks)
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    rows.write_text(rows.read_text() + '{"id": "bad", "tokens": "none"}\n')
    output = {"path": url, "unit_rows": 4}
    spec = write_spec(tmp_path, rows=rows, output=output, errors={"max_rate": 1.0}, **more)
    store = open_store(Place(url, options or S3_DEFAULTS))
    with monkeypatch.context() as patch, pytest.raises(FailpointError):
        patch.setenv("DRAFTMILL_FAILPOINTS", "driver.receipt=raise:5")
        main(["run", str(spec), "--local", "--quiet", "--debug"])
    reset_failpoints()
    assert len(done_units(store)) >= 5
    reads = Reads(monkeypatch)
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    sizes = sorted(stat.size for stat in store.list("data/"))
    assert reads.bytes <= (0 if kind == "s3" else sum(sizes[-2:])), "of those without a receipt"
    table = capsys.readouterr().out
    assert "25  (24 ok, 1 failed, 0 skipped)" in table and "bad: " in table
    reads.bytes = 0
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert reads.bytes < 0.01 * sum(sizes)
    assert capsys.readouterr().out.partition("\n")[2] == table
    for name in ("_SUCCESS", "_manifest.json"):
        store.delete(name)
    reads.bytes = 0
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert reads.bytes <= (0 if kind == "s3" else sum(sizes[-2:]))
    assert main(["verify", url, *(["--s3-endpoint", options.endpoint] if options else [])]) == 0


def no_locks(*_: object) -> None:
    """As on a file system that has none."""
    raise OSError(errno.ENOSYS, "no locks")


def test_a_file_that_appears_late_in_a_shared_folder_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "APPEARS_S", 0.5)
    store = open_store(str(tmp_path))
    unit = CommittedUnit(0, unit_name(0), "", 1, 1, 0, 0, 1, "0" * 64)
    late = iter([False, False])
    monkeypatch.setattr(store, "exists", lambda name: next(late, True))
    files = session.FilesHere(store)
    files.look("w0", unit)
    files.wait()
    monkeypatch.setattr(store, "exists", lambda name: False)
    files.look("w0", unit)
    files.wait()
    files.look("w1", unit)
    with pytest.raises(StoreError, match=r"a worker wrote data/unit-00000000\.parquet, but not here"):
        files.wait()
    with pytest.raises(StoreError, match=r"output\.path must be a shared folder"):
        files.look("w0", unit)


def test_a_model_that_can_not_be_loaded_is_exit_code_2(tmp_path, capsys):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 4))
    assert main(["run", str(spec), "--local", "--quiet", "--set", "model.device=cuda"]) == 2
    assert "model.device: 'cuda', but torch" in capsys.readouterr().err


def test_a_ray_of_our_own_is_as_nice_as_its_driver_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr("draftmill.jobs.drive.ray_session._init", lambda **options: None)
    for given, expected in ((None, "0"), ("7", "7")):
        monkeypatch.setattr("os.environ", {} if given is None else {"RAY_worker_niceness": given})
        ray_session._start_local(None, lambda message: None)
        assert os.environ.pop("RAY_worker_niceness") == expected
        assert int(os.environ.pop("RAY_gcs_server_request_timeout_seconds")) > 60, "Ray's own limit"


def test_a_ray_of_our_own_starts_without_a_web_server_and_monitors_and_other_starts_have_them(monkeypatch):
    """Names of Ray's own: a version without them would quietly start everything again."""
    parts = ("start_api_server", "start_monitor", "start_log_monitor")
    before = {name: getattr(Node, name) for name in parts}
    seen: list[object] = []
    monkeypatch.setattr(
        "draftmill.jobs.drive.ray_session._init",
        lambda **options: seen.extend(getattr(Node, name)() for name in parts),
    )
    monkeypatch.setattr("os.environ", {})
    ray_session._start_local(None, lambda message: None)
    assert seen == [None] * 3
    assert {name: getattr(Node, name) for name in parts} == before


def test_a_small_model_gets_one_thread():
    resources = WorkerResources(cpus=1.0, gpus=0.0, threads=16)
    wanted = {0: 1, 3_700_000: 1, 135_000_000: 6, 8_000_000_000: 16}
    assert {size: fitting_threads(resources, size).threads for size in wanted} == wanted


def test_a_run_is_resumed_with_inputs_that_have_moved(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    spec = write_spec(tmp_path, rows=rows)
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    before = rows_of(tmp_path / "run")
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000001.parquet"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "moved").mkdir()
    rows.rename(tmp_path / "moved" / "rows.jsonl")
    moved = f"input.path={tmp_path / 'moved' / 'rows.jsonl'}"
    assert main(["run", str(spec), "--local", "--quiet", "--set", moved]) == 0
    assert rows_of(tmp_path / "run").equals(before)


def test_a_resumed_run_on_a_disk_reads_the_files_of_earlier_units_side_by_side(tmp_path, monkeypatch):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    with monkeypatch.context() as patch, pytest.raises(FailpointError):
        patch.setenv("DRAFTMILL_FAILPOINTS", "commit.before_manifest=raise")
        main(["run", str(spec), "--local", "--quiet", "--debug"])
    reset_failpoints()
    shutil.rmtree(tmp_path / "run" / "attempts")  # else its facts are enough
    real, both = session.committed_facts, Barrier(2)

    def read(plan: Plan, name: str) -> CommittedUnit:
        both.wait(60)  # the two units wait for each other
        return real(plan, name)

    monkeypatch.setattr(session, "committed_facts", read)
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0
