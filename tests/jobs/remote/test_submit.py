"""Submitting, following and stopping against a fake cluster: one job a run directory, safe to repeat, its own exit code."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.log import shown
from draftmill.jobs.remote import submit as submit_module
from draftmill.jobs.remote.cluster import RUN, Unreachable, stem_of
from draftmill.jobs.remote.submit import SubmitRequest, end_of, follow, start, stop_jobs
from draftmill.storage.errors import UserError
from tests.jobs.remote import test_request
from tests.jobs.remote.fake_cluster import FakeCluster, FakeJob

REQUEST = SubmitRequest("command", {})


def spec(path: str = "s3://bucket/run", name: str = "My job!") -> JobSpec:
    return test_request.spec(name=name, output={"path": path})


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_module, "POLL_S", 0.001)


def test_a_run_has_names_of_its_own_that_grow_by_one():
    cluster = FakeCluster()
    first = start(cluster, spec(), REQUEST)
    assert first.startswith("draftmill-my-job-")
    assert first.endswith("-1")
    cluster.known[first].end("FAILED", 1)
    assert start(cluster, spec(), REQUEST) == f"{first[:-1]}2"
    other = start(cluster, spec("s3://bucket/other"), REQUEST)
    assert other.endswith("-1")
    assert len({name.rpartition("-")[0] for name in (first, other)}) == 2
    assert stem_of("a", "s3://b/r", "http://one") != stem_of("a", "s3://b/r", "http://two")


def test_the_same_submission_follows_the_job_that_runs_and_says_if_its_settings_differ(caplog):
    caplog.set_level(logging.INFO)
    cluster = FakeCluster()
    name = start(cluster, spec(), REQUEST)
    assert start(cluster, spec(), REQUEST) == name
    assert caplog.messages[-1].endswith("runs already for this run directory")
    assert start(cluster, spec(name="renamed"), replace(REQUEST, entrypoint="other")) == name
    assert "submitted with other settings" in caplog.messages[-1]
    assert len(cluster.known) == 1


def test_of_two_submissions_at_the_same_moment_one_starts_the_job_and_both_follow_it():
    cluster = FakeCluster()
    name = f"{stem_of('My job!', 's3://bucket/run')}-1"
    cluster.late = [FakeJob(name, metadata={RUN: "s3://bucket/run"})]
    assert start(cluster, spec(), REQUEST) == name
    assert cluster.known[name].entrypoint == "", "it is the other one's job"


def test_a_dated_run_gets_its_date_when_it_is_submitted_and_a_job_for_each_date(tmp_path, monkeypatch, capsys):
    cluster = FakeCluster()
    monkeypatch.setattr(submit_module, "RayJobs", lambda *_: cluster)
    data = spec("s3://bucket/daily/{date:%Y-%m-%d}").model_dump(mode="json") | {"input": {"path": "s3://bucket/rows"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
    for date in ("2026-11-21", "2026-11-22", "2026-11-22"):
        options = ["--code", "installed", "--no-wait", "--logical-date", date, "--if-running", "skip"]
        assert main(["submit", str(tmp_path / "job.yaml"), "--address", "head", *options]) == 0
    first, second = cluster.jobs()
    assert [first.metadata[RUN], second.metadata[RUN]] == [
        "s3://bucket/daily/2026-11-21",
        "s3://bucket/daily/2026-11-22",
    ]
    assert '"logical_date": "2026-11-21T00:00:00Z"' in first.entrypoint
    assert "--if-running skip" in first.entrypoint
    capsys.readouterr()


def test_a_cluster_that_has_just_started_is_asked_again():
    cluster = FakeCluster()
    cluster.unready = 3
    assert start(cluster, spec(), REQUEST) in cluster.known


@pytest.mark.parametrize(
    ("status", "code", "message", "expected", "words"),
    [
        ("SUCCEEDED", 0, None, 0, ""),
        ("FAILED", 1, None, 1, ""),
        ("FAILED", 2, None, 2, ""),
        ("FAILED", 3, None, 3, ""),
        ("FAILED", 4, None, 4, ""),
        ("FAILED", 137, None, 1, "ended with exit code 137"),
        ("FAILED", -9, None, 1, "ended with signal 9"),
        ("FAILED", None, "Failed to set up runtime environment.\nlong\nno such image", 1, "environment. no such image"),
        ("STOPPED", None, None, 4, "was stopped"),
    ],
)
def test_the_exit_code_is_the_drivers_own(status, code, message, expected, words):
    end = end_of(SimpleNamespace(status=status, driver_exit_code=code, message=message))
    assert end[0] == expected
    assert words in end[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the commands; a sleep of any length takes a second."""
    fake = SimpleNamespace(now_s=0.0)
    fake.monotonic, fake.sleep = lambda: fake.now_s, lambda _: setattr(fake, "now_s", fake.now_s + 1.0)
    monkeypatch.setattr(submit_module, "time", fake)
    return fake


def test_each_text_of_a_growing_log_is_printed_once(clock, capsys):
    job = FakeJob("j")
    cluster = FakeCluster(job)

    def script(asked: int) -> None:
        job.log = "".join(f"line {number}\n" for number in range(min(asked, 50)))
        if asked >= 60:
            job.end("SUCCEEDED", 0)

    cluster.script = script
    with shown():
        assert follow(cluster, "j") == 0
    assert capsys.readouterr().out == job.log and cluster.reads > 1


def test_a_long_log_is_read_less_often(clock, capsys):
    job = FakeJob("j", log="x" * 1_000_000)
    cluster = FakeCluster(job)
    cluster.script = lambda asked: job.end("SUCCEEDED", 0) if asked > 100 else None
    with shown():
        assert follow(cluster, "j") == 0
    assert capsys.readouterr().out == job.log
    assert cluster.reads == 21  # one in 5 s, 200,000 characters a second, and the last


def test_a_cluster_that_is_silent_for_a_while_is_borne_and_then_given_up(clock):
    job = FakeJob("j")
    cluster = FakeCluster(job)
    cluster.deaf = 20
    cluster.script = lambda asked: job.end("SUCCEEDED", 0) if asked > 20 else None
    assert follow(cluster, "j") == 0
    cluster.deaf = 10**6
    with pytest.raises(Unreachable, match="what became of j is unknown: submit it again"):
        follow(cluster, "j")
    assert 60 < clock.now_s < 90


def test_an_interrupt_ends_the_following_and_not_the_job(caplog):
    def interrupted(asked: int) -> None:
        raise KeyboardInterrupt

    cluster = FakeCluster(FakeJob("draftmill-x-1"))
    cluster.script = interrupted
    with caplog.at_level(logging.INFO):
        assert follow(cluster, "draftmill-x-1") == 4
    assert "draftmill stop draftmill-x-1 --address http://head:8265" in caplog.text
    assert cluster.known["draftmill-x-1"].status == "RUNNING"


def test_a_job_is_stopped_by_its_name_or_its_run_directory(caplog):
    caplog.set_level(logging.INFO)
    jobs = [FakeJob("a-1", metadata={RUN: "/runs/a"}, status="FAILED"), FakeJob("a-2", metadata={RUN: "/runs/a"})]
    cluster = FakeCluster(*jobs, FakeJob("b-1", metadata={RUN: "/runs/b"}))
    assert stop_jobs(cluster, "runs/a", "/runs/a", wait=True)
    assert [cluster.known[name].status for name in ("a-1", "a-2", "b-1")] == ["FAILED", "STOPPED", "RUNNING"]
    assert stop_jobs(cluster, "b-1", "/b-1", wait=True)
    assert stop_jobs(cluster, "b-1", "/b-1", wait=True)
    assert caplog.messages[-1] == "nothing to stop: b-1 has ended (STOPPED)"
    with pytest.raises(UserError, match="TARGET: 'c' is no job"):
        stop_jobs(cluster, "c", "/runs/c", wait=True)
