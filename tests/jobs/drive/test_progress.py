"""What a user sees while a job runs, and its log: counted numbers, one JSON object a line, nothing secret, no run fails by it."""

import io
import json
import logging
import sys
import threading
import warnings

import pytest

from draftmill.actors.messages import Effort, Receipt, Tally, TurnReport
from draftmill.decoders.base import EngineStats
from draftmill.jobs.drive import run_log
from draftmill.jobs.drive.log import FACTS, LOST, JsonLines, event_record, print_result, shown
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import LINES_PER_FILE, RunLog, session_record
from draftmill.jobs.drive.totals import Totals, efficiency, progress_line
from draftmill.jobs.formatting import duration, rate_text, size_text
from draftmill.jobs.results.runs import status
from draftmill.storage.errors import StoreError, StoreRefused
from draftmill.storage.runs.lease import acquire
from draftmill.storage.stores.store import MemoryStore, Stat, Store, open_store
from tests.jobs.compare.made_runs import row, write_run
from tests.jobs.drive.test_metrics import Hand, log_in


def totals_after(seconds: float) -> Totals:
    """Two workers since time 0; 25 of 100 samples were done before, 25 are decoded now."""
    clock = iter([0.0] + [seconds] * 20)
    totals = Totals(units=4, rows=100, units_before=1, rows_before=25, clock=lambda: next(clock))
    totals.worker_up("w0", {})
    totals.worker_up("w1", {})
    decoded = Tally(rows=25, ok=24, failed=1, new_tokens=500, nfe=300)
    totals.add_report("w0", TurnReport((), Effort(), decoded, waiting=25))
    return totals


def test_the_line_holds_samples_rate_nfe_errors_workers_and_the_time_to_go():
    line = progress_line(totals_after(10.0))
    assert line == "50/100 samples (50%)  50 tokens/s  0.600 NFE/token  1 error  2 workers  ETA 0:20"


def test_rows_that_failed_in_the_plan_are_errors_that_take_no_time():
    totals = totals_after(10.0)
    totals.planned_failures = 26
    assert totals.eta_s == 10.0 * 25 / 24, "25 of the 50 that are left fail, and of the 25 that ended one did"
    totals.add_report("w1", TurnReport((), Effort(), Tally(rows=25, failed=25), waiting=25))
    assert totals.eta_s == 10.0 * 25 / 24 and " 26 errors " in progress_line(totals)


def test_before_anything_is_decoded_nothing_is_made_up():
    line = progress_line(Totals(units=1, rows=10))
    assert line == "0/10 samples (0%)  0 tokens/s  - NFE/token  0 errors  0 workers  ETA -"


@pytest.mark.parametrize(("counts_open", "tokens"), [(True, 700), (False, 500)], ids=["tokens", "tried lengths"])
def test_tokens_count_while_their_samples_still_go_on_unless_they_are_of_tried_lengths(counts_open, tokens):
    totals = totals_after(10.0)
    totals.counts_open = counts_open
    totals.add_report("w1", TurnReport((), Effort(EngineStats(committed=700)), Tally()))
    assert totals.tokens == tokens and f" {tokens // 10} tokens/s " in progress_line(totals)


def test_status_knows_what_has_ended_inside_a_unit(tmp_path, capsys):
    store = open_store(str(write_run(tmp_path / "run", [row(number) for number in range(40)])))
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000001.parquet"):
        store.delete(name)
    totals = Totals(units=2, rows=40, clock=lambda: 10.0, started_s=0.0, units_held=1)
    totals.waiting = {"w0": 15}
    totals.committed = Tally(rows=20, ok=20, new_tokens=80)
    totals.decoded = Tally(rows=35, ok=35, new_tokens=140)
    store.put("attempts/epoch-0001-session.jsonl", json.dumps(session_record(totals)).encode())
    acquire(store, "elsewhere:boot:1", 60.0)
    status(store.place)
    said = capsys.readouterr().out
    assert "samples  35 of 40 done" in said and "rate     3.5 samples/s, 14 tokens/s\n  ETA      0:01" in said


def test_rates_sizes_and_durations_are_short():
    rates = {0.0: "0", 0.04: "0.0", 0.34: "0.3", 9.94: "9.9", 9.96: "10", 12.3: "12", 4321.0: "4,321"}
    assert {rate: rate_text(rate) for rate in rates} == rates
    assert [size_text(size) for size in (0, 999, 1234, 15_000_000)] == ["0 bytes", "999 bytes", "1.2 kB", "15.0 MB"]
    assert [duration(seconds) for seconds in (5.4, 65, 3723)] == ["0:05", "1:05", "1:02:03"]


def test_workers_that_are_not_up_yet_load_the_model():
    totals = Totals(units=1, rows=10)
    for loading, text in ((1, "1 worker loads the model"), (3, "3 workers load the model")):
        totals.loading = {f"w{number}" for number in range(loading)}
        assert text in progress_line(totals)
    totals.worker_up("w0", {})
    assert "1 worker " in progress_line(totals)


def test_what_takes_long_before_the_first_token_has_a_line_with_sizes(capsys):
    now = iter([0.0, 3.0, 6.0, 9.0])
    lines = Display(clock=lambda: next(now))
    with shown():
        for done in (10**9, 2 * 10**9, 3 * 10**9):
            lines.step("hashing the model", done, 15 * 10**9)
    assert capsys.readouterr() == ("", "hashing the model: 2.0 GB of 15.0 GB\n")


def test_samples_decoded_twice_never_make_more_than_there_are():
    totals = totals_after(10.0)
    totals.waiting["w1"] = 90
    assert totals.rows_done == 100


def test_samples_of_a_unit_that_could_not_be_stored_are_not_done():
    totals = totals_after(10.0)
    totals.waiting["w0"] = 0  # the unit has failed, and its samples will be decoded again
    assert totals.rows_done == 25 and progress_line(totals).startswith("25/100 samples (25%)")
    totals.add_receipt(Receipt(0, 0, "w0", "n", None, Tally(rows=30, ok=30)))
    assert totals.rows_done == 55


def test_a_pipe_gets_a_line_each_five_seconds_at_first_then_each_thirty(capsys):
    now = [0.0]
    lines = Display(clock=lambda: now[0])
    seconds = []
    with shown():
        for second in range(400):
            now[0], totals = float(second), Totals(units=1, rows=10)
            totals.started_s = 200.0 if second >= 200 else None
            lines.show(totals)
            seconds += [second] if capsys.readouterr().err else []
    loading = [*range(5, 60, 5), 85, 115, 145, 175]
    assert seconds == [*loading, *range(200, 260, 5), 285, 315, 345, 375]


class Terminal(io.StringIO):
    """A terminal in the place of stderr. It keeps each write apart, and fails them once `is_gone`."""

    is_gone = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.parts: list[str] = []
        monkeypatch.setattr(sys, "stderr", self)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError("gone")
        self.parts.append(text)
        return len(text)


def test_a_terminal_has_a_live_line_with_the_notes_above_it(monkeypatch):
    terminal = Terminal(monkeypatch)
    with Display() as of_the_library:
        of_the_library.note("planning")
    with shown():
        Display().note("starting Ray")
        logging.getLogger("draftmill.jobs.cli").error("no: %s", "nothing")
        assert terminal.parts == ["starting Ray\n", "draftmill: no: nothing\n"], "one write each: threads do not mix"
        with Display() as display:
            display.show(totals_after(10.0))
            display.note("resuming")
            display.step("hashing the model", 3, 12)
            display.event("done", unit=1)
    text = "".join(terminal.parts)
    assert "resuming" in text and "3 bytes of 12 bytes" in text and "done" not in text and sys.stderr is terminal


def test_a_terminal_that_vanishes_ends_no_work(monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown(), Display() as display:
        terminal.is_gone = True
        display.show(totals_after(10.0))
        display.note("resuming")
    assert LOST == {"stderr": "OSError"}


@pytest.mark.parametrize("as_json", [True, False])
def test_no_other_display_has_a_live_line(as_json, monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown(as_json=as_json, quiet=not as_json), Display() as display:
        display.show(totals_after(10.0))
        display.note("resuming")
    assert len(terminal.parts) == as_json


def test_a_receipt_counts_its_samples():
    totals = Totals(units=1, rows=3)
    totals.add_receipt(Receipt(0, 0, "w0", "n", None, Tally(rows=3, ok=1, failed=2), {"too_long": 2}))
    assert (totals.units_done, totals.committed.failed) == (1, 2)


def test_efficiency_leaves_out_what_was_not_counted():
    engine = EngineStats(steps=4, forward_s=3.0, active_slot_steps=6, slot_steps=8, useful_rows=9, computed_rows=10)
    figures = efficiency(Effort(engine, wall_s=4.0, tail_s=1.0))
    assert figures == {"token_padding_eff": 0.9, "lane_eff": 0.75, "engine_eff": 0.75, "tail_frac": 0.25}
    shared = EngineStats(prompt_rows=8, prompt_rows_shared=6)
    assert efficiency(Effort(shared)) == {"prompts_shared": 0.75}


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
