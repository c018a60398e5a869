"""One driver per recurring job: of several at once one works, the others leave, wait or fail; nothing is decoded twice."""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.jobs.drive import leases as module
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.leases import IfRunning, base_lease, hold_lease
from draftmill.jobs.drive.log import shown
from draftmill.jobs.exit_codes import INTERRUPTED, OK, TOO_MANY_FAILED, Ended
from draftmill.jobs.run import job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.runs.lease import LEASE, LeaseHeld, LeaseLost, acquire
from draftmill.storage.stores.s3 import S3Store
from tests.jobs.run.recurring_jobs import DATED, driver, nightly, run, units_decoded
from tests.runs.jobs_of_tests import rows_of

OVERLAP = "plan.before_plan=sleep:1:1.5"
"""The driver that works still plans while the others start."""


@dataclass
class DayAhead:
    """The clock of a machine that is a day ahead and stands still."""

    ahead_s: float = 86_400.0

    def __call__(self) -> float:
        return NOW_S + self.ahead_s


NOW_S = time.time()


@pytest.fixture
def run_work(monkeypatch: pytest.MonkeyPatch):
    """Runs a job that consists of a function, and returns the exit code; `sleep` is called in place of time.sleep."""

    def run_job(work, if_running: IfRunning, sleep=time.sleep) -> int:
        monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, sleep=sleep))
        monkeypatch.setattr(job, "complete_job", lambda *_: work())
        spec: Any = None
        with shown():
            return job.run_job(spec, RunOptions(if_running=if_running))

    return run_job


def held_elsewhere(base, seconds: float) -> None:
    """Let a driver of another machine hold the base path."""
    base.mkdir(parents=True, exist_ok=True)
    lease = {"owner": "elsewhere:boot-1:77", "epoch": 3, "expires_at_s": time.time() + seconds}
    (base / LEASE).write_text(json.dumps(lease))


def test_the_lease_of_a_name_is_held_once_and_free_afterwards(store):
    lost, job = StopFlag().set, r"another driver holds the job .*, until 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    with base_lease(store, lost), pytest.raises(LeaseHeld, match=job), base_lease(store, lost):
        pass
    with base_lease(store, lost), pytest.raises(LeaseHeld, match="this run directory"), hold_lease(store, lost):
        pass


def test_a_broken_spec_leaves_no_base_path_behind(tmp_path, capsys):
    spec = nightly(tmp_path, model={"path": str(tmp_path / "nowhere"), "tokenizer": "none", "device": "cpu"})
    assert run(spec) == 2
    assert "model.path" in capsys.readouterr().err
    assert not (tmp_path / "nightly").exists()


def test_waiting_starts_the_work_again_when_the_lease_is_free(store, run_work, capsys):
    other = acquire(store, "elsewhere:boot-1:77", 3600.0)
    calls, sleeps = [], []

    def work() -> None:
        calls.append(1)
        with base_lease(store, StopFlag().set):
            pass

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            other.release()

    with pytest.raises(LeaseHeld, match="elsewhere:boot-1:77"):
        run_work(work, "fail")
    assert run_work(work, "wait", sleep=sleep) == OK
    assert (len(calls), sleeps) == (3, [module.POLL_S] * 3)
    assert capsys.readouterr().err.count("draftmill: waiting") == 1


def test_a_driver_that_may_be_lost_is_skipped_only_if_it_renews_its_lease(store, run_work, capsys):
    other = acquire(store, "elsewhere:boot-1:77", 60.0)
    calls, sleeps = [], []

    def work() -> None:
        calls.append(1)
        with base_lease(store, StopFlag().set):
            raise Ended("too many", TOO_MANY_FAILED)

    def alive(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:
            other.renew()

    def lost(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 5:
            other.release()  # as when it has run out

    assert run_work(work, "skip", sleep=alive) == OK
    said = capsys.readouterr()
    assert "draftmill: skipped: another driver holds the job" in said.out and "waiting for a sign of life" in said.err
    assert (len(calls), len(sleeps)) == (1, 2)
    assert run_work(work, "skip", sleep=lost) == TOO_MANY_FAILED, "the work is done after all"
    assert (len(calls), len(sleeps)) == (3, 5)
    assert "skipped" not in capsys.readouterr().out


def test_what_a_run_does_where_another_machine_holds_the_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.05)
    spec = nightly(tmp_path)
    held_elsewhere(tmp_path / "nightly", 3600)
    assert run(spec) == INTERRUPTED, "a run typed by hand"
    assert "elsewhere:boot-1:77" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "nightly").iterdir()] == [LEASE]
    held_elsewhere(tmp_path / "nightly", 0.5)  # it was killed, and does not renew
    assert run(spec, "--if-running", "wait", "--logical-date", "2026-11-21") == OK
    assert rows_of(tmp_path / "nightly" / "2026-11-21").num_rows == 8
    assert run(spec, "--logical-date", "2026-11-21") == OK
    assert "already finished" in capsys.readouterr().out


def test_without_a_date_the_option_means_the_lease_of_the_run_directory(tmp_path, capsys):
    spec = nightly(tmp_path, output={"path": str(tmp_path / "one"), "unit_rows": 4})
    held_elsewhere(tmp_path / "one", 3600)
    assert run(spec) == INTERRUPTED
    assert "another driver holds this run directory: elsewhere:boot-1:77" in capsys.readouterr().err


@pytest.mark.parametrize("if_running", ["skip", "wait"])
def test_a_lease_of_a_wrong_clock_is_taken_over_unless_renewed(store, if_running, run_work, capsys):
    day_ahead = DayAhead()
    other = acquire(store, "elsewhere:boot-1:77", 60.0, day_ahead)
    sleeps = []

    def work() -> None:
        with base_lease(store, StopFlag().set):
            raise Ended("too many", TOO_MANY_FAILED)

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 20:
            day_ahead.ahead_s += 15
            other.renew()

    if if_running == "skip":
        assert run_work(work, "skip", sleep=sleep) == OK
        assert "skipped" in capsys.readouterr().out and len(sleeps) == 20
    assert run_work(work, if_running, sleep=sleep) == TOO_MANY_FAILED
    assert module.TTL_S < sum(sleeps) < 3 * module.TTL_S
    date = datetime.fromtimestamp(other.expires_at_s, UTC).strftime("until %Y-%m-%d %H:%M:%S UTC")
    assert (
        f"taken over: another driver holds the job {store.url}: elsewhere:boot-1:77, {date}" in capsys.readouterr().err
    )
    with pytest.raises(LeaseLost):
        other.renew()


def test_a_run_directory_is_no_base_path(tmp_path, capsys):
    (tmp_path / "nightly").mkdir()
    (tmp_path / "nightly" / "_plan.json").write_text("{}")
    assert run(nightly(tmp_path)) == 2
    assert "output.path: " in capsys.readouterr().err


def start_at_once(spec, date: str, logs: list) -> None:
    """A driver for each log: all end well, one of them by its work."""
    options = ("--logical-date", date, "--if-running", "skip")
    drivers = [driver(spec, log, *options, failpoints=OVERLAP) for log in logs]
    for process in drivers:
        process.join(120)
    said = [log.read_text() for log in logs]
    assert [process.exitcode for process in drivers] == [OK] * len(logs), said
    assert sum("draftmill: skipped" in text for text in said) == len(logs) - 1, said


@pytest.mark.slow
def test_of_drivers_started_at_once_one_works_and_nothing_is_decoded_twice(tmp_path):
    spec = nightly(tmp_path)
    for day in range(1, 5):
        date, count = f"2026-11-{day:02d}", 2 + day % 2
        start_at_once(spec, date, [tmp_path / f"{day}-{number}.log" for number in range(count)])
        done = tmp_path / "nightly" / date
        assert units_decoded(done) == {0: 1, 1: 1}
        assert rows_of(done).num_rows == 8


@pytest.mark.slow
@pytest.mark.s3
def test_of_drivers_started_at_once_on_s3_one_works(tmp_path, s3_url, s3_options):
    spec = nightly(
        tmp_path,
        output={"path": f"{s3_url}/nightly/{DATED}", "unit_rows": 4},
        s3={"endpoint": s3_options.endpoint, "region": s3_options.region},
    )
    start_at_once(spec, "2026-11-01", [tmp_path / f"{number}.log" for number in range(3)])
    store = S3Store(f"{s3_url}/nightly/2026-11-01", s3_options)
    assert {stat.name.partition("-part")[0] for stat in store.list("attempts/")} == {
        "attempts/epoch-0001",
        "attempts/epoch-0001-session.jsonl",
    }
    assert rows_of(store).num_rows == 8


@pytest.mark.slow
def test_a_driver_that_is_killed_is_replaced_and_one_that_waits_takes_over(tmp_path):
    spec, log = nightly(tmp_path), tmp_path / "log"
    killed = driver(spec, log, "--logical-date", "2026-11-22", failpoints="commit.after_data=kill:1")
    killed.join(120)
    assert killed.exitcode == -9
    done = tmp_path / "nightly" / "2026-11-22"
    before = {file: file.stat().st_mtime_ns for file in done.glob("data/*")}
    assert len(before) == 1
    waits = [driver(spec, log, "--logical-date", "2026-11-22", "--if-running", "wait") for _ in range(2)]
    for process in waits:
        process.join(120)
        assert process.exitcode == OK, log.read_text()
    assert rows_of(done).num_rows == 8
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert "already finished" in log.read_text()
