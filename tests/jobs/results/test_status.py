"""What `draftmill status` says of the driver and of the run."""

import secrets
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.actors.messages import Effort
from draftmill.decoders.base import EngineStats
from draftmill.jobs.cli import main
from draftmill.jobs.drive.run_log import Sessions
from draftmill.jobs.results import runs
from draftmill.jobs.results.runs import FoundRun, facts_of, status_lines
from draftmill.storage.runs.lease import acquire, driver_of, this_process
from draftmill.storage.stores.store import MemoryStore, open_store


def test_a_driver_that_was_killed_is_not_said_to_run():
    store = MemoryStore(secrets.token_hex(8))
    alive = acquire(store, this_process(), 60)
    assert driver_of(store) == this_process() and facts_of(FoundRun("", store, store.level())).state == "running"
    alive.release()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    acquire(store, f"{this_process().rpartition(':')[0]}:{process.pid}", 60)
    assert driver_of(store) is None and facts_of(FoundRun("", store, store.level())).state == "interrupted"


def test_what_the_workers_compute_with_is_shown(monkeypatch):
    started = Counter({"NVIDIA H100, bfloat16; kernels on; graphs off: DRAFTMILL_GRAPHS is 0": 2})
    lines = lines_of(Sessions(started_on=started), monkeypatch)
    assert "  workers  2 started on NVIDIA H100, bfloat16; kernels on; graphs off: DRAFTMILL_GRAPHS is 0" in lines


@pytest.mark.parametrize(
    ("shared", "line"), [(6, "  prompts  75.0% of their rows taken over from other samples, not computed"), (0, None)]
)
def test_the_share_of_prompt_rows_that_were_taken_over_is_shown_where_there_is_any(monkeypatch, shared, line):
    sessions = Sessions(effort=Effort(EngineStats(prompt_rows=8, prompt_rows_shared=shared)))
    assert [one for one in lines_of(sessions, monkeypatch) if "prompts" in one] == ([line] if line else [])


def lines_of(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(runs, "read_sessions", lambda _: sessions)
    plan: Any = SimpleNamespace(rows=4, units=1, sizes=lambda: iter(()))
    return list(status_lines(MemoryStore(secrets.token_hex(8)), plan))


def test_a_run_without_a_plan_is_being_planned_or_was_interrupted(tmp_path, capsys, monkeypatch):
    place = str(tmp_path / "run")
    lease = acquire(open_store(place), this_process(), 60.0)
    (tmp_path / "run" / "plan").mkdir()
    assert main(["status", place]) == 0 == main(["logs", place, "--json"])
    printed = capsys.readouterr()
    planned = f"{place} is being planned, driver {this_process()}\n"
    assert (printed.out, printed.err) == (planned, f"draftmill: {planned}")
    monkeypatch.setattr(
        "draftmill.jobs.results.runs.time.sleep", lambda s: lease.release()
    )  # the driver ends while it is followed
    assert main(["logs", place, "--follow"]) == 0
    interrupted = f"{place} was interrupted while it was planned: run it again\n"
    assert capsys.readouterr().err == f"draftmill: {planned}draftmill: {interrupted}"
    assert main(["status", place]) == 0
    assert capsys.readouterr().out == interrupted
    assert main(["verify", place]) == 2
    assert capsys.readouterr().err == f"draftmill: {interrupted}"
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[1:4] == ["1", "run", "run"]
    assert main(["verify", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_the_status_of_a_folder_without_runs_is_refused(tmp_path, capsys):
    """A script that counts the runs below a folder gets an empty list."""
    (tmp_path / "_manifest.json").touch()  # of a run whose plan was deleted
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"draftmill: no run is at or below {tmp_path}: no _plan.json\n")
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
