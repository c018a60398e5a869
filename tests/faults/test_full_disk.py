"""A disk that is full while a job runs: a clear error, nothing lost, and the next run goes on once there is room."""

import errno
import os
import re

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.run import session
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.storage.runs.commit import done_units
from draftmill.storage.stores import local
from draftmill.storage.stores.local import TEMPORARY
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import rows_of, unequal, write_rows, write_spec
from tests.runs.local_pool import without_ray


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more unit files the disk has room for; another one is cut short, as a full disk does it."""
    left = [10**9]
    write = local._write_synced

    def write_or_not(path, data: bytes) -> None:
        left[0] -= path.parent.name == "data"
        if left[0] >= 0 or path.parent.name != "data":
            return write(path, data)
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local, "_write_synced", write_or_not)
    monkeypatch.setattr(session, "limits_of", lambda spec: Limits(rest_s=0.0))
    return left


def test_a_full_disk_ends_the_run_with_a_clear_error_and_the_next_one_finishes_it(tmp_path, room, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 16, longest=12)
    spec, run = write_spec(tmp_path, rows=rows, out="full"), tmp_path / "full"
    with without_ray():
        assert main(["run", str(write_spec(tmp_path, rows=rows, out="free")), "--quiet"]) == 0
        room[0] = 2
        assert main(["run", str(spec)]) == 4
        first, *_, last = [line for line in capsys.readouterr().err.splitlines() if "No space left on device" in line]
        assert re.match(r"unit \d+ can't be stored: .*: No space left on device; it is retried$", first)
        assert re.match(r"draftmill: unit \d+ failed 3 times: .*make room, then run it again to continue$", last)
        assert len(done_units(open_store(str(run)))) == 2
        assert not [path for path in run.rglob("*") if path.name.startswith(TEMPORARY)]
        room[0] = 10**9
        assert main(["run", str(spec), "--quiet"]) == 0
    assert not unequal(rows_of(run), rows_of(tmp_path / "free"))
    assert main(["verify", str(run)]) == 0
