"""What happens to a driver's process from outside: nobody reads what it prints, or it is asked to end while it plans."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.actors.planning import surveying
from draftmill.jobs.cli import program
from draftmill.storage.runs.lease import LEASE
from tests.runs.jobs_of_tests import forked, logged, write_rows, write_spec

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
    assert sorted(said) == [f"{name} can't be written any more, the run goes on: {reason}" for name in lost]
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
