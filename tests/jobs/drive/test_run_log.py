"""Events and the log of a run: one JSON object a line, nothing before a run exists, nothing secret, and no run fails by it."""

import json
import logging
import threading
import warnings

import pytest

from draftmill.jobs.drive import run_log
from draftmill.jobs.drive.log import FACTS, JsonLines, event_record, print_result, shown
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import LINES_PER_FILE, RunLog
from draftmill.jobs.drive.totals import Totals
from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.stores.store import MemoryStore, Stat, Store, open_store
from tests.jobs.drive.test_cost import Hand, log_in

SECRET = "b8c1f0a94d7e"


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_event_is_one_line_without_secrets_whatever_is_in_it(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    facts: dict = {"unit": 3, "worker": None, "nested": {"list": [SECRET, 1]}}
    record = event_record("note", f"two\nlines {SECRET}", level=logging.WARNING, **facts)
    line = JsonLines("output", {"run": "job"}).format(record)
    assert "\n" not in line and SECRET not in line + repr(vars(record)), "nor is one in a user's own handlers"
    event = json.loads(line)
    assert list(event)[:5] == ["time", "level", "event", "message", "run"]
    assert (event["level"], event["unit"], event["nested"]) == ("warning", 3, {"list": ["[hidden]", 1]})
    assert event["time"].endswith("Z") and "worker" not in event


def test_as_json_everything_that_is_logged_or_shown_is_an_event(capsys, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    before = logging.getLogger("draftmill").level, list(logging.getLogger().handlers)
    with shown(as_json=True):
        FACTS["run"] = "job"
        print_result("a table\n\n  its row")
        logging.getLogger("draftmill.jobs.cli").error(f"no: {SECRET}")
        logging.getLogger("another.library").warning("old")
        warnings.warn("older", stacklevel=1)
    assert (logging.getLogger("draftmill").level, list(logging.getLogger().handlers)) == before
    printed = capsys.readouterr()
    out, err = lines_of(printed.out), lines_of(printed.err)
    assert [event["message"] for event in out] == ["a table", "  its row"] and {e["level"] for e in out} == {"info"}
    assert [(e["level"], e["message"]) for e in err[:2]] == [("error", "no: [hidden]"), ("warning", "old")]
    assert "older" in err[2]["message"] and {(e["event"], e["run"]) for e in out + err} == {("output", "job")}


def test_events_have_units_workers_and_progress_in_figures(capsys):
    clock = Hand()
    display = Display(clock=clock)
    clock.now_s += 30.0
    with shown(as_json=True):
        display.event("worker_died", "worker w1 died: killed", level=logging.WARNING, worker="w1", reason="killed")
        display.event("done", unit=7, worker="w0", rows=25)
        display.show(Totals(units=4, rows=100, clock=clock))
    died, done, figures = lines_of(capsys.readouterr().err)
    assert (died["event"], died["worker"], died["level"]) == ("worker_died", "w1", "warning")
    assert (done["unit"], done["level"], "message" in done) == (7, "info", False)
    assert (figures["event"], figures["samples"], figures["workers"]) == ("progress", 100, 0)


def test_nothing_is_written_before_the_log_belongs_to_a_run_and_then_everything():
    store = open_store("memory://run-log-early")
    log = RunLog()
    display = Display(log)
    display.note("hashing the model")
    log.write_out()
    assert list(store.list()) == [] and not log.is_attached
    log.attach(store, 3, "job")
    display.note("planned")
    display.event("done", unit=1)
    log.write_out()
    events = lines_of(store.get("attempts/epoch-0003-part-0000.jsonl").decode())
    assert [event.get("message") for event in events] == ["hashing the model", "planned", None]
    assert events[1]["run"] == "job" and (events[2]["event"], events[2]["unit"]) == ("done", 1)


def test_the_log_is_written_every_ten_seconds_and_has_the_progress_every_minute():
    clock, store = Hand(), open_store("memory://driver-log-period")
    log = log_in(store, clock=clock)
    log.add("note", "begun")
    totals = Totals(units=1, rows=10, clock=clock)
    written = []
    for _ in range(130):
        clock.now_s += 1.0
        log.show(totals)
        stat = store.stat("attempts/epoch-0001-part-0000.jsonl")
        written.append(0 if stat is None else len(lines_of(store.get(stat.name).decode())))
    assert written[8] == 0 and written[9] == 1
    assert written[-1] == 3 and sorted(set(written)) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [StoreError("full"), StoreRefused("no permission")])
def test_a_store_that_refuses_the_log_fails_no_run_and_gets_the_lines_later(error):
    class Refusing(MemoryStore):
        refuses = True

        def put(self, name: str, data: bytes) -> Stat:
            if self.refuses:
                raise error
            return super().put(name, data)

    store = Refusing(f"memory://refusing-{type(error).__name__}")
    log = log_in(store)
    log.add("note", "one")
    log.write_out()
    store.refuses = False
    log.add("note", "two")
    log.write_out()
    events = lines_of(store.get("attempts/epoch-0001-part-0000.jsonl").decode())
    assert [event["message"] for event in events] == ["one", "two"]


class Hanging(MemoryStore):
    """A store that answers no put until it is released."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.released = threading.Event()

    def put(self, name: str, data: bytes) -> Stat:
        assert self.released.wait(60)
        return super().put(name, data)


def test_nobody_waits_for_a_store_that_hangs(monkeypatch):
    monkeypatch.setattr(run_log, "MOST_LINES", 50)
    clock, store = Hand(), Hanging("run-log-hangs")
    log = log_in(store, clock=clock)
    totals = Totals(units=1, rows=10, clock=clock)
    for number in range(100):
        clock.now_s += 5.0
        log.add("note", str(number))
        log.show(totals)
    log.patience_s = 0.1
    log.write_out(totals)
    log.write_out(totals)
    assert [thread.name for thread in threading.enumerate()].count("log") == 1
    store.released.set()
    log.patience_s = 60.0
    log.write_out(totals)
    messages = notes_in(store, 0)
    assert messages[:3] == ["0", "1", "2"] and 40 < len(messages) <= 60, "later ones are only counted"
    assert "events are not here: the store took too long" in " ".join(map(str, messages))


def notes_in(store: Store, part: int) -> list[str | None]:
    events = lines_of(store.get(f"attempts/epoch-0001-part-{part:04d}.jsonl").decode())
    return [event.get("message") for event in events]


def test_a_full_file_is_followed_by_another_and_not_written_again():
    store = open_store("memory://line-files")
    log = log_in(store)
    for number in range(LINES_PER_FILE):
        log.add("note", str(number))
    log.write_out()
    etag = store.stat("attempts/epoch-0001-part-0000.jsonl")
    log.add("note", "more")
    log.write_out()
    log.write_out()
    assert notes_in(store, 1) == ["more"]
    assert store.stat("attempts/epoch-0001-part-0000.jsonl") == etag


class Raced(list[str]):
    """Lines to which another thread adds one in the moment after they were copied."""

    def __init__(self, add) -> None:
        super().__init__()
        self.then = [add]

    def __getitem__(self, place):
        found = super().__getitem__(place)
        while isinstance(place, slice) and self.then:
            self.then.pop()()
        return found


def test_a_line_that_comes_while_the_others_are_copied_is_in_the_next_flush():
    store = open_store("memory://raced-lines")
    log = log_in(store)
    log._lines = Raced(lambda: log.add("note", "late"))
    log.add("note", "early")
    log.write_out()
    log.write_out()
    assert notes_in(store, 0) == ["early", "late"]
