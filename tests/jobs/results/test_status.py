"""What `draftmill status` says of the driver and of the run, and the table at the end of a run."""

import secrets
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.actors.messages import Effort, Tally
from draftmill.decoders.base import EngineStats
from draftmill.jobs.cli import main
from draftmill.jobs.drive.run_log import Sessions
from draftmill.jobs.results import runs
from draftmill.jobs.results.runs import FoundRun, facts_of, status_lines
from draftmill.jobs.results.summary import is_small, table_lines
from draftmill.storage.runs.commit import Manifest
from draftmill.storage.runs.lease import acquire, driver_of, this_process
from draftmill.storage.runs.records import MOST_CHARS, Sums, sum_up, sums_of_text, table_from_rows
from draftmill.storage.runs.unit_facts import UnitFacts
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


def row(name: str, kind: str | None = None, error: str | None = None) -> dict:
    place = {"id": name, "unit": 0, "pass": 1, "attempt": 1}
    return place | {
        "status": "failed" if kind else "ok",
        "error_kind": kind,
        "error": error,
        "new_tokens": 0 if kind else 2,
    }


def table(results: Sums, sessions: Sessions | None = None) -> list[str]:
    return table_lines("job", "run", Manifest("f", 1, UnitFacts()), results, sessions or Sessions())


def test_the_table_names_the_first_failed_samples_of_each_kind_and_why():
    rows = [
        row("fine"),
        row("big", "too_long", "2100 tokens;\n the model takes 2048"),
        row("odd\x1b[2J", "bad_row", "x" * 500),
    ]
    rows += [row(f"torn {number}", "bad_json", f"at {number}") for number in range(5)]
    tables = [table_from_rows(rows[:4]), table_from_rows(rows[4:])]
    lines = [line.strip() for line in table(sum_up(tables))]
    (errors,) = [number for number, line in enumerate(lines) if line.startswith("errors")]
    assert lines[errors].split(maxsplit=1)[1] == "5 bad_json, 1 too_long, 1 bad_row"
    said = [" ".join(line.split()) for line in lines[errors + 1 : -1]]
    assert said[:4] == [f"bad_json torn {number}: at {number}" for number in range(3)] + [
        "and 2 more of status failed and error_kind bad_json"
    ]
    assert said[4] == "too_long big: 2100 tokens; the model takes 2048"
    assert said[5].startswith("bad_row odd\\x1b[2J: xxx") and said[5].endswith("...") and len(said) == 6


def test_the_table_says_how_many_steps_raised():
    for raised in (0, 3):
        sessions = Sessions(5.0, 5.0, Tally(rows=3, ok=3), Effort(EngineStats(raised=raised), 5.0, 1.0))
        lines = table(Sums(rows=3, ok=3), sessions)
        assert any("steps that raised" in line and " 3 " in line for line in lines) == bool(raised)


def test_the_table_says_how_much_was_cut_to_fit():
    rows = [row(str(cut)) | {"truncated_tokens": cut} for cut in (0, 5, 70)]
    lines = table(sum_up([table_from_rows(rows)]))
    assert any(" ".join(line.split()) == "cut to fit 2 samples, 75 tokens of them" for line in lines)
    assert not any("cut to fit" in line for line in table(Sums(rows=3, ok=3)))


@pytest.mark.parametrize(
    ("rows", "wall_s", "small"), [(4, 60.0, True), (255, 60.0, True), (256, 60.0, False), (10**6, 5.0, True)]
)
def test_a_small_job_shows_no_figures_of_how_well_the_machine_was_used(rows, wall_s, small):
    engine = EngineStats(
        steps=10, forward_s=3.0, slot_steps=320, active_slot_steps=100, useful_rows=9, computed_rows=10
    )
    tally = Tally(rows=rows, ok=rows, new_tokens=600)
    sessions = Sessions(wall_s, 2 * wall_s, tally, Effort(engine, 50.0, 1.0))
    assert is_small(rows, sessions) == small
    labels = " ".join(line.split("  ")[1] for line in table(Sums(rows=rows, ok=rows, new_tokens=600), sessions)[1:])
    assert "tokens/s" in labels and "errors" in labels
    assert ("lane efficiency" in labels) == ("makespan ratio" in labels) == (not small)


def test_sums_of_units_add_up_in_any_order_as_text_too():
    units = [
        [
            row(f"{unit}:{number}", "odd" if number % 2 else None, f"é  why {number}") | {"unit": unit}
            for number in range(4)
        ]
        for unit in range(5)
    ]
    whole = sum_up(table_from_rows(rows) for rows in units)
    for order in (units, units[::-1]):
        added = Sums()
        for rows in order:
            text = sum_up([table_from_rows(rows)]).to_text()
            assert text.isascii() and "  " not in text
            added.add(sums_of_text(text))
        assert added.errors == whole.errors == {"odd": 10} and (added.rows, added.new_tokens) == (20, 20)
        examples = [tuple(example) for example in added.examples["odd"]]
        assert (
            examples == whole.examples["odd"] == [(0, "0:1", "é why 1"), (0, "0:3", "é why 3"), (1, "1:1", "é why 1")]
        )


def test_sums_with_long_examples_fit_into_a_stores_metadata():
    rows = [row(f"{kind} {number}", f"kind {kind}", "é" * 90) for kind in range(9) for number in range(3)]
    text = sum_up([table_from_rows(rows)]).to_text()
    found = sums_of_text(text)
    assert len(text) <= MOST_CHARS and sum(found.errors.values()) == 27 and 0 < len(found.examples) < 9
    many = [row(str(kind), f"a kind of errors that has a name, number {kind}") for kind in range(99)]
    assert sum_up([table_from_rows(many)]).to_text() == ""
