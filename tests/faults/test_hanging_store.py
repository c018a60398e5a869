"""Signals where Python's handlers can't end the process: the store hangs, or one forward takes minutes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.stores.store import S3_DEFAULTS, Place, S3Options, Store, open_store
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 48

PROGRAM = """
import errno, fcntl, sys, time
from pathlib import Path
from typing import Any
from draftmill.jobs import cli
from draftmill.storage.stores.local import LocalStore

hangs, kind, *sys.argv[1:] = sys.argv[1:]

def hanging(verb):
    def call(*arguments, **more):
        while Path(hangs).exists():
            time.sleep(0.05)
        return verb(*arguments, **more)
    return call

def refuse(*_):
    raise OSError(errno.ENOSYS, "no locks here")

for verb in ("get", "get_range", "create", "put", "replace", "list", "level", "exists", "stat", "delete"):
    setattr(LocalStore, verb, hanging(getattr(LocalStore, verb)))
if kind == "without locks":
    fcntl.flock = refuse
cli.program()
"""


@contextmanager
def running(spec, store: Store, points: str, *program: str):
    """`draftmill run` in a process of its own that has committed a unit."""
    command = [sys.executable, *program, "run", str(spec), "--local", "--quiet", "--grace-seconds", "6"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"DRAFTMILL_FAILPOINTS": points}
    )
    try:
        while not list(store.list("data/")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)  # the condition is polled, not assumed
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["local disk", "without locks", pytest.param("s3", marks=pytest.mark.s3)])
def test_sigterm_ends_within_its_grace_while_the_store_hangs(kind, tmp_path, request, s3_server):
    rows, hangs = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "hangs"
    sections: dict = {}
    url, options = str(tmp_path / "run"), None
    if kind == "s3":
        url, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options")
        assert isinstance(options, S3Options)
        sections["s3"] = {"endpoint": options.endpoint, "region": options.region}
    spec = write_spec(tmp_path, rows=rows, output={"path": url, "unit_rows": 2}, batching={"max_rows": 1}, **sections)
    store = open_store(Place(url, options or S3_DEFAULTS))
    program = "-c", PROGRAM, str(hangs), kind
    with running(spec, store, "worker.step=sleep:30:2", *program) as process:
        hangs.touch()
        s3_server.app.hangs = kind == "s3"
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        _, err = process.communicate(timeout=100)
        assert process.returncode == 4 and "run it again to resume" in err, err
        assert time.monotonic() - began_s < 8, err
    hangs.unlink()
    s3_server.app.hangs = False
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert rows_of(store).num_rows == ROWS
    more = ["--s3-endpoint", str(options.endpoint)] if options else []
    assert main(["verify", url, *more]) == 0


def test_a_second_sigint_within_a_long_forward_ends_at_once(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    spec = write_spec(tmp_path, rows=rows, batching={"max_rows": 1})
    with running(
        spec, open_store(str(tmp_path / "run")), "worker.step=sleep:60:200", "-m", "draftmill.jobs.cli"
    ) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert "a second signal ends it at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        assert process.wait(100) == 4 and time.monotonic() - began_s < 4
        assert "ended by force after SIGINT; run it again to resume" in process.stderr.read()
    assert main(["run", str(spec), "--local", "--quiet"]) == 0
    assert rows_of(tmp_path / "run").num_rows == ROWS
