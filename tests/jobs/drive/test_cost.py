"""Device time: every second of a worker has one purpose, also of workers that die, and resumed sessions add up."""

import time

import pytest

from draftmill.actors.messages import Effort, Receipt, Tally, TurnReport
from draftmill.jobs.drive.run_log import RunLog, read_sessions
from draftmill.jobs.drive.totals import DeviceSums, Totals, device_time_rows, hours_text, purposes_of
from draftmill.jobs.results.runs import device_time_lines
from draftmill.storage.stores.store import Store, open_store


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def log_in(store: Store, epoch: int = 1, *, clock=time.monotonic) -> RunLog:
    """The log of a driver of this run directory."""
    log = RunLog(clock=clock)
    log.attach(store, epoch, "job")
    return log


def at_work(clock: Hand) -> Totals:
    """Two workers: w0 loads 10 s, decodes 30 of its 50 s, 20 of them for committed units; w1 dies 8 s after its only report."""
    totals = Totals(units=1, rows=1, clock=clock)
    totals.worker_up("w0", {"load_s": 10.0})
    totals.worker_up("w1", {"load_s": 5.0})
    clock.now_s += 12.0
    totals.add_report("w1", TurnReport((), Effort(wall_s=12.0), Tally()))
    clock.now_s += 8.0
    totals.worker_ended("w1", lost=True)
    clock.now_s += 30.0
    totals.add_report("w0", TurnReport((), Effort(wall_s=30.0), Tally()))
    totals.add_receipt(Receipt(0, 0, "w0", "node", None, Tally(), spent_s=20.0))
    return totals


def worked(clock: Hand) -> Totals:
    totals = at_work(clock)
    totals.stop()
    return totals


def test_every_second_of_a_worker_has_one_purpose():
    sums = worked(Hand()).devices
    assert sums.up_s == (10 + 50) + (5 + 20)
    assert purposes_of(sums) == {"decoding": 20, "loading": 15, "idle": 20, "wasted": (30 - 20) + 12 + 8}
    assert sum(purposes_of(sums).values()) == sums.up_s


def test_what_is_in_progress_is_not_called_wasted():
    sums = worked(Hand()).devices
    purposes = purposes_of(sums, open_s=sums.open_s)
    assert purposes["wasted"] == sums.lost_s == 8 and sums.open_s == 22
    assert sum(purposes.values()) + sums.open_s == sums.up_s


def test_hours_are_printed_with_three_digits():
    assert [hours_text(seconds) for seconds in (0.0, 0.0011, 0.31, 85.0, 3599.0, 5400.0, 3.6e7)] == [
        "0 s", "0.00 s", "0.31 s", "85 s", "3,599 s", "1.5 h", "10,000 h",
    ]  # fmt: skip


def test_sessions_add_up_without_records_that_are_torn():
    store = open_store("memory://sessions-add-up")
    for epoch in (1, 2):
        log_in(store, epoch).write_out(worked(Hand()))
    store.put("attempts/epoch-0003-session.jsonl", b'{"wall_s": 1.0, "torn')
    assert read_sessions(store).devices.up_s == pytest.approx(2 * 85)


def test_what_a_lost_driver_did_last_is_missing_and_said_to_be():
    store, hand = open_store("memory://sessions-cut"), Hand()
    for epoch in (1, 2):
        log = log_in(store, epoch, clock=hand)
        log.show(Totals(units=1, rows=1, clock=hand))
        assert store.stat(f"attempts/epoch-{epoch:04d}-session.jsonl") is None
        totals = at_work(hand)
        log.show(totals)  # a session is known from its first worker on, however soon its driver is lost
        assert read_sessions(store).devices.unended == epoch
        if epoch == 2:
            totals.stop()
            log.write_out(totals)
    sums = read_sessions(store).devices
    assert sums.unended == 1 and sums.up_s == pytest.approx(2 * 85)
    assert [text.partition("  ")[0] for _, text in device_time_rows(sums)] == ["at least 170 s"]
    (running,) = device_time_lines([store], is_running=True)
    assert running.split()[2] == "170", "what still runs is no loss"
    whole = device_time_rows(worked(hand).devices)
    assert [text.partition("  ")[0] for _, text in whole] == ["85 s"]


def test_a_driver_that_is_lost_soon_leaves_the_time_of_its_first_unit():
    store, hand = open_store("memory://first-unit"), Hand()
    log, totals = log_in(store, clock=hand), Totals(units=2, rows=2, clock=hand)
    totals.worker_up("w0", {})
    log.show(totals)
    totals.add_receipt(Receipt(0, 0, "w0", "node", None, Tally(), spent_s=2.0))
    log.show(totals)
    log.write_out()
    assert read_sessions(store).devices.counted_s == 2.0


def test_a_worker_that_ended_twice_or_never_came_up_counts_once_or_not():
    clock = Hand()
    totals = Totals(units=1, rows=1, clock=clock)
    totals.worker_ended("never", lost=True)
    totals.worker_up("w0", {})
    clock.now_s += 1.0
    totals.worker_ended("w0")
    clock.now_s += 9.0
    totals.worker_ended("w0", lost=True)
    totals.stop()
    assert totals.devices == DeviceSums(up_s=1.0) and totals.workers == 0
