"""The command line: what a user sees, as processes of their own and in this one, and what happens to them from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.actors.planning import surveying
from draftmill.jobs import cli
from draftmill.jobs.cli import program
from draftmill.storage.errors import StoreRefused
from draftmill.storage.runs.lease import LEASE
from tests.runs.jobs_of_tests import forked, logged, write_namesakes, write_rows, write_spec
from tests.runs.local_pool import without_ray

BEFORE = ("hashing the model: ", "planning: reading 1 input file, ", "starting Ray", "loading the model on ")
"""What is said before the first token."""


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_on_a_ray_of_its_own_says_only_what_matters_whatever_stands_beside_it(tmp_path):
    write_namesakes(tmp_path)
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 12))
    done = subprocess.run(
        [sys.executable, "-m", "draftmill.jobs.cli", "run", str(spec)],
        cwd=tmp_path,
        env={**os.environ, "DRAFTMILL_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    planned = "planned: 12 samples"
    # On a busy machine a line of progress may come, every 30 s, and a blank line of Ray's.
    progress = re.compile(r"[\d,]+/12 samples ")
    said = [line for line in done.stderr.splitlines() if line and not progress.match(line)]
    assert [line for line in said if not line.startswith(("planning: ", *BEFORE, planned))] == []
    assert not [start for start in BEFORE if not any(line.startswith(start) for line in said)], said
    assert planned in done.stderr and "12 ok" in done.stdout and str(tmp_path / "run" / "data") in done.stdout


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_joins_a_cluster_by_its_address(ray_session, tmp_path):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    address = ray_session.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "draftmill.jobs.cli", "run", str(spec), "--ray-address", address, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "8 ok" in done.stdout


def test_results_in_memory_are_refused_where_ray_would_decode_them(tmp_path, capsys):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    assert cli.main(["run", str(spec), "--set", "output.path=memory://results"]) == 2
    assert "output.path: 'memory://results' is memory of one process" in capsys.readouterr().err


@pytest.mark.slow
def test_an_address_where_nobody_listens_is_exit_code_2(tmp_path):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    command = [sys.executable, "-m", "draftmill.jobs.cli", "run", str(spec), "--ray-address", "127.0.0.1:1", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2 and done.stderr.startswith("draftmill: --ray-address: nothing listens at 127.0.0.1:1")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_tried_again_and_said(tmp_path, capsys, monkeypatch):
    tries = []

    def too_busy(**options: object) -> None:
        tries.append(options)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("draftmill.jobs.drive.ray_session._init", too_busy)
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    assert cli.main(["run", str(spec)]) == 1
    err = capsys.readouterr().err
    assert len(tries) == 3 and "starting Ray" in err
    assert err.count("The current node timed out during startup.; trying again") == 2
    assert "draftmill: Ray did not start (attempt 3 of 3, " in err and "use --local, which needs no Ray" in err
    assert "run it again later, it resumes" in err and (tmp_path / "run" / "_plan.json").exists()
    monkeypatch.undo()
    with without_ray():
        assert cli.main(["run", str(spec), "--quiet"]) == 0


def test_a_user_error_is_one_line_and_exit_code_2(tmp_path, capsys):
    spec = write_spec(tmp_path, rows=tmp_path / "missing.jsonl")
    assert cli.main(["run", str(spec)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("draftmill: input.path: ") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_something_unexpected_is_one_line_and_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftmill.actors.checkpoints.models.builtin_models", lambda: dict[str, int]()["nothing"])
    assert cli.main(["models"]) == 1
    assert capsys.readouterr().err == "draftmill: unexpected KeyError: 'nothing' (--debug shows where)\n"
    with pytest.raises(KeyError):
        cli.main(["models", "--debug"])


@pytest.mark.parametrize(
    ("command", "said"), [("run", "interrupted; run it again to resume\n"), ("validate", "interrupted\n")]
)
def test_an_interrupt_says_go_on_where_something_is_left(tmp_path, capsys, monkeypatch, command, said):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftmill.jobs.config.spec.load_spec", interrupted)
    assert cli.main([command, str(tmp_path / "any.yaml")]) == 4
    assert capsys.readouterr().err == f"draftmill: {said}"


@pytest.mark.parametrize(
    "command",
    ["run x.yaml --grace-seconds -3", "run x.yaml --grace-seconds nan", "rerun run --failed --grace-seconds soon",
     "verify run --invariance -1", "export run --format parquet --out x --file-mb 0"],
)  # fmt: skip
def test_a_number_that_makes_no_sense_is_refused_with_what_is_allowed(command, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(command.split())
    assert refused.value.code == 2 and "is not allowed; allowed: " in capsys.readouterr().err


def test_models_names_families_decoders_and_builtin_models(capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert "xlnet" in out and "assd" in out and "settings: k, drafter" in out


@pytest.mark.parametrize(
    ("arguments", "endpoint", "is_said"),
    [
        (["status", "s3://bucket/run"], None, True),
        (["compare", "s3://bucket/a", "s3://bucket/b"], None, True),
        (["status", "s3://bucket/run", "--s3-endpoint", "http://here:9000"], None, False),
        (["status", "s3://bucket/run"], "http://here:9000", False),
        (["status", "runs/local"], None, False),
    ],
)
def test_a_run_on_another_service_is_told_how_to_name_it(monkeypatch, capsys, arguments, endpoint, is_said):
    def refused() -> int:  # it gets the parameters that it names
        raise StoreRefused("s3://bucket/run: Forbidden (403)")

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr("draftmill.jobs.results.runs.status", refused)
    monkeypatch.setattr("draftmill.jobs.compare.compare.compare", refused)
    assert cli.main(arguments) == 2
    hint = "; another S3 service than Amazon's is --s3-endpoint URL, or AWS_ENDPOINT_URL" if is_said else ""
    assert capsys.readouterr().err == f"draftmill: s3://bucket/run: Forbidden (403){hint}\n"


FULL = "/dev/full"


def deaf(out: str, err: str, *arguments: str) -> None:
    """A driver's process whose streams go to these files; "" is a pipe that nobody reads."""
    for number, place in ((1, out), (2, err)):
        if place:
            file = os.open(place, os.O_WRONLY | os.O_CREAT)
        else:
            nobody, file = os.pipe()
            os.close(nobody)
        os.dup2(file, number)
    sys.argv = ["draftmill", *arguments]
    program()


@pytest.mark.parametrize("log", ["text", "json"])
@pytest.mark.parametrize(("out", "err"), [("", ""), (FULL, FULL), (FULL, "shown")])
@pytest.mark.slow
def test_a_display_that_can_not_be_written_ends_no_run_and_is_noted_in_its_log(tmp_path, out, err, log):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8, longest=6))
    shown = str(tmp_path / err) if err == "shown" else err
    process = forked(deaf, out, shown, "run", str(spec), "--local", "--log", log)
    process.join(120)
    assert process.exitcode == 0
    assert (tmp_path / "run" / "_SUCCESS").exists()
    notes = [event["message"] for event in logged(tmp_path / "run", "note")]
    said = [note for note in notes if "can't be written" in note]
    reason = "No space left on device" if out == FULL else "Broken pipe"
    lost = ["stdout"] if err == "shown" else ["stderr", "stdout"]
    assert sorted(said) == [f"{name} can't be written any more, the run continues: {reason}" for name in lost]
    if err == "shown":
        assert "planned: 8 samples" in Path(shown).read_text()


def test_output_that_a_command_is_for_is_missed_where_it_can_not_be_written():
    command = [sys.executable, "-m", "draftmill.jobs.cli", "models"]
    with open(FULL, "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (
        1,
        "draftmill: unexpected OSError: [Errno 28] No space left on device (--debug shows where)\n",
    )
    closed = subprocess.run(
        f"{sys.executable} -m draftmill.jobs.cli models >&-", shell=True, check=False, capture_output=True, timeout=120
    )
    assert (closed.returncode, closed.stderr) == (0, b"")


def stalling(place: str, *arguments: str) -> None:
    """A driver's process whose planning never ends; it says so by a file."""

    def stalled(*_: object) -> None:
        Path(place).touch()
        while True:
            time.sleep(60)

    surveying._measure_batch = stalled  # type: ignore[assignment]
    sys.argv = ["draftmill", *arguments]
    program()


@pytest.mark.slow
def test_one_sigterm_while_planning_ends_a_driver_with_4_whatever_a_planning_thread_does(tmp_path):
    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 8))
    process = forked(stalling, str(tmp_path / "stalled"), "run", str(spec), "--local", "--quiet")
    until_s = time.monotonic() + 120
    while not (tmp_path / "stalled").exists() and process.is_alive() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 4
    assert json.loads((tmp_path / "run" / LEASE).read_text())["expires_at_s"] == 0, "the lease is given back"
