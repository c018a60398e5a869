"""The crontab entry under a real cron in the foreground: a real job from a folder with an awkward name, each minute."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftmill.jobs.cli import main
from tests.jobs.remote.made import text_of, write_spec

CRON_D = Path("/etc/cron.d")
ROOT = Path(__file__).resolve().parents[3]


def missing() -> str:
    if shutil.which("cron") is None:
        return "cron is not installed (Debian: cron)"
    return "" if os.geteuid() == 0 else "cron in the foreground needs root"


pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing() or "cron is here"),
]


@pytest.fixture
def installed(request: pytest.FixtureRequest):
    """A file in /etc/cron.d that is gone after the test, and a cron that reads it."""
    entry = CRON_D / f"draftmill-test-{os.getpid()}"
    daemon = subprocess.Popen(["cron", "-f"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield entry
    finally:
        entry.unlink(missing_ok=True)
        daemon.terminate()
        daemon.wait(30)


def test_cron_runs_the_job_and_the_next_minute_finds_it_done(installed, tmp_path, monkeypatch):
    place = tmp_path / 'it\'s 100% "odd" \\n $HOME'
    place.mkdir()
    program = place / "draftmill"
    program.write_text(f'#!/bin/bash\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m draftmill.jobs.cli "$@"\n')
    program.chmod(0o755)
    secret = place / "keys of 50%.env"
    secret.write_text("OMP_NUM_THREADS=1\nDRAFTMILL_CACHE=from-the-file\n")
    spec = write_spec(place, workers={"count": 1, "cpus": 1}, output={"path": "runs/one", "unit_rows": 4})
    monkeypatch.chdir(place)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(place / "python"))
        entry = text_of(spec, "cron", secret=str(secret), schedule="* * * * *")
    installed.write_text(entry.replace("\n* * * * * ", "\n* * * * * root "))
    installed.chmod(0o644)
    run, log = place / "runs" / "one", place / "nightly.log"
    wait_for((run / "_SUCCESS").exists, 900, log)
    wait_for(lambda: "12 ok, 0 failed" in log.read_text(), 120, log)  # the driver says so after its mark of success
    before = {path.name: path.stat().st_mtime_ns for path in (run / "data").iterdir()}
    finished = log.read_text().count("12 ok, 0 failed")
    wait_for(lambda: log.read_text().count("12 ok, 0 failed") > finished, 200, log)  # a later start says the same
    installed.unlink()
    assert {path.name: path.stat().st_mtime_ns for path in (run / "data").iterdir()} == before
    assert main(["verify", str(run)]) == 0


def wait_for(happened: object, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end, log.read_text() if log.exists() else "cron started nothing"
        time.sleep(1)
