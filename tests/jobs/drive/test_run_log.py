"""Events and the log of a run: one JSON object a line, nothing before a run exists, nothing secret, and no run fails by it."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from draftmill.jobs.drive import run_log
from draftmill.jobs.drive.events import JsonStream, event_line, json_streams, say_in_events
from draftmill.jobs.drive.progress import EventDisplay, LineDisplay, make_display
from draftmill.jobs.drive.run_log import LINES_PER_FILE, LoggedDisplay, RunLog
from draftmill.jobs.drive.totals import Totals
from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.stores.interface import Stat, Store
from draftmill.storage.stores.store import MemoryStore, open_store
from tests.jobs.drive.test_cost import Hand, log_in

SECRET = "b8c1f0a94d7e"


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_event_is_one_line_without_secrets_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    line = event_line(
        "note", f"two\nlines {SECRET}", level="warning", unit=3, worker=None, nested={"list": [SECRET, 1]}
    )
    assert "\n" not in line and SECRET not in line
    event = json.loads(line)
    assert list(event)[:4] == ["time", "level", "event", "message"]
    assert (event["level"], event["unit"], event["nested"]) == ("warning", 3, {"list": ["[hidden]", 1]})
    assert event["time"].endswith("Z") and "worker" not in event


def test_with_json_streams_everything_that_is_printed_is_an_event(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    out_before, err_before = sys.stdout, sys.stderr
    with json_streams():
        say_in_events(run="job")
        print("a table\n  its row")
        print(f"draftmill: no: {SECRET}", file=sys.stderr)
        sys.stderr.write("no line end")
        assert isinstance(make_display(quiet=False), EventDisplay)
    assert (sys.stdout, sys.stderr) == (out_before, err_before)
    printed = capsys.readouterr()
    out, err = lines_of(printed.out), lines_of(printed.err)
    assert [event["message"] for event in out] == ["a table", "  its row"] and {e["level"] for e in out} == {"info"}
    assert [event["message"] for event in err] == ["draftmill: no: [hidden]", "no line end"]
    assert {event["run"] for event in out + err} == {"job"} and {e["level"] for e in err} == {"warning"}


def test_lines_of_threads_do_not_mix() -> None:
    text = io.StringIO()
    stream = JsonStream(text, "info")
    both_have_begun = threading.Barrier(2)

    def talk(word: str) -> None:
        stream.write(f"{word} begins")
        both_have_begun.wait(10)
        stream.write(f" and {word} ends\n")

    threads = [threading.Thread(target=talk, args=(word,)) for word in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event["message"] for event in lines_of(text.getvalue())) == [
        "one begins and one ends",
        "two begins and two ends",
    ]


def test_the_display_of_events_has_units_workers_and_progress_in_figures() -> None:
    clock, text = Hand(), io.StringIO()
    display = EventDisplay(JsonStream(text, "warning"), clock=clock)
    totals = Totals(units=4, rows=100, clock=clock)
    display.note("planning")
    display.event("worker_died", "worker w1 died: killed", level="warning", worker="w1", reason="killed")
    display.event("done", unit=7, worker="w0", rows=25)
    display.show(totals)
    clock.now_s += 30.0
    display.show(totals)
    events = lines_of(text.getvalue())
    assert [event["event"] for event in events] == ["note", "worker_died", "done", "progress"]
    assert (events[1]["worker"], events[1]["level"], events[2]["unit"]) == ("w1", "warning", 7)
    assert (events[3]["samples"], events[3]["samples_done"], events[3]["workers"]) == (100, 0, 0)


def test_nothing_is_written_before_the_log_belongs_to_a_run_and_then_everything() -> None:
    store = open_store("memory://run-log-early")
    log = RunLog()
    display = LoggedDisplay(LineDisplay(io.StringIO()), log)
    display.note("hashing the model")
    log.flush()
    assert list(store.list()) == [] and not log.is_attached
    log.attach(store, 3, "job")
    display.note("planned")
    display.event("done", unit=1)
    log.flush()
    events = lines_of(store.get("attempts/epoch-0003-part-0000.jsonl").decode())
    assert [event.get("message") for event in events] == ["hashing the model", "planned", None]
    assert events[1]["run"] == "job" and (events[2]["event"], events[2]["unit"]) == ("done", 1)


def test_the_log_is_written_every_ten_seconds_and_has_the_progress_every_minute() -> None:
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
def test_a_store_that_refuses_the_log_fails_no_run_and_gets_the_lines_later(error: StoreError) -> None:
    class Refusing(MemoryStore):
        refuses = True

        def put(self, name: str, data: bytes) -> Stat:
            if self.refuses:
                raise error
            return super().put(name, data)

    store = Refusing(f"memory://refusing-{type(error).__name__}")
    log = log_in(store)
    log.add("note", "one")
    log.flush()
    store.refuses = False
    log.add("note", "two")
    log.flush()
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


def test_nobody_waits_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_LINES", 50)
    clock, store = Hand(), Hanging("run-log-hangs")
    log = log_in(store, clock=clock)
    totals = Totals(units=1, rows=10, clock=clock)
    for number in range(100):
        clock.now_s += 5.0
        log.add("note", str(number))
        log.show(totals)
    log.patience_s = 0.1
    log.flush(totals)
    log.flush(totals)
    assert [thread.name for thread in threading.enumerate()].count("log") == 1
    store.released.set()
    log.patience_s = 60.0
    log.flush(totals)
    messages = notes_in(store, 0)
    assert messages[:3] == ["0", "1", "2"] and 40 < len(messages) <= 60, "later ones are only counted"
    assert "events are not here: the store took too long" in " ".join(map(str, messages))


def notes_in(store: Store, part: int) -> list[str | None]:
    events = lines_of(store.get(f"attempts/epoch-0001-part-{part:04d}.jsonl").decode())
    return [event.get("message") for event in events]


def test_a_full_file_is_followed_by_another_and_not_written_again() -> None:
    store = open_store("memory://line-files")
    log = log_in(store)
    for number in range(LINES_PER_FILE):
        log.add("note", str(number))
    log.flush()
    etag = store.stat("attempts/epoch-0001-part-0000.jsonl")
    log.add("note", "more")
    log.flush()
    log.flush()
    assert notes_in(store, 1) == ["more"]
    assert store.stat("attempts/epoch-0001-part-0000.jsonl") == etag


class Raced(list[str]):
    """Lines to which another thread adds one in the moment after they were copied."""

    def __init__(self, add: Callable[[], None]) -> None:
        super().__init__()
        self.then = [add]

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        while isinstance(place, slice) and self.then:
            self.then.pop()()
        return found


def test_a_line_that_comes_while_the_others_are_copied_is_in_the_next_flush() -> None:
    store = open_store("memory://raced-lines")
    log = log_in(store)
    log._lines = Raced(lambda: log.add("note", "late"))
    log.add("note", "early")
    log.flush()
    log.flush()
    assert notes_in(store, 0) == ["early", "late"]
