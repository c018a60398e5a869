"""Device time: every second of a worker has one purpose, also of workers that die, and resumed sessions add up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from draftmill.actors.messages import Effort, Tally
from draftmill.decoders.base import EngineStats
from draftmill.jobs.driving.cost import DeviceSums, DeviceTime, cost_rows, hours_text, purposes_of
from draftmill.jobs.driving.run_log import RunLog, read_sessions
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.running.status import cost_lines
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import open_store


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def log_in(store: Store, epoch: int = 1, *, clock: Callable[[], float] = time.monotonic) -> RunLog:
    """The log of a driver of this run directory."""
    log = RunLog(clock=clock)
    log.attach(store, epoch, "job")
    return log


def worked(clock: Hand, price: float | None) -> DeviceTime:
    """Two workers: w0 loads 10 s, decodes 30 of its 50 s, 20 of them for committed units; w1 dies 8 s after its only report."""
    devices = DeviceTime(clock, lambda worker: price)
    devices.up("w0", load_s=10.0)
    devices.up("w1", load_s=5.0)
    clock.now_s += 12.0
    devices.heard("w1", 12.0)
    clock.now_s += 8.0
    devices.end_worker("w1", lost=True)
    clock.now_s += 30.0
    devices.heard("w0", 30.0)
    devices.add_unit(20.0)
    devices.stop()
    return devices


def test_every_second_of_a_worker_has_one_purpose() -> None:
    sums = worked(Hand(), None).sums
    assert sums.up_s == (10 + 50) + (5 + 20)
    assert purposes_of(sums) == {"decoding": 20, "loading": 15, "idle": 20, "wasted": (30 - 20) + 12 + 8}
    assert sum(purposes_of(sums).values()) == sums.up_s
    assert sums.cost == sums.priced_s == 0


def test_what_is_in_progress_is_not_called_wasted() -> None:
    sums = worked(Hand(), None).sums
    purposes = purposes_of(sums, open_s=sums.open_s)
    assert purposes["wasted"] == sums.lost_s == 8 and sums.open_s == 22
    assert sum(purposes.values()) + sums.open_s == sums.up_s


def test_money_is_hours_times_the_price() -> None:
    sums = worked(Hand(), 3.60).sums
    assert sums.cost == pytest.approx(85 / 3600 * 3.60) and sums.priced_s == sums.up_s
    rows = dict(cost_rows(sums, 50_000))
    assert rows["cost"] == f"0.085  ({0.085 * 20:.2f} per million tokens of ok samples)"


def test_sessions_with_and_without_a_price_are_told_apart() -> None:
    both = worked(Hand(), 3.60).sums + worked(Hand(), None).sums
    assert dict(cost_rows(both, 50_000))["cost"] == "0.085 for 85 s; 85 s had no price"
    assert [hours_text(seconds) for seconds in (0.0, 0.0011, 0.31, 85.0, 3599.0, 5400.0, 3.6e7)] == [
        "0 s", "0.00 s", "0.31 s", "85 s", "3,599 s", "1.5 h", "10,000 h",
    ]  # fmt: skip


def test_sessions_add_up_also_after_one_that_was_killed_and_one_of_an_earlier_version() -> None:
    store = open_store("memory://sessions-add-up")
    for epoch in (1, 2):
        totals = Totals(units=1, rows=1, devices=worked(Hand(), 3.60))
        totals.worker_up()
        log_in(store, epoch).flush(totals)
    store.put("attempts/epoch-0003-session.jsonl", json.dumps(old_record()).encode())
    store.put("attempts/epoch-0004-session.jsonl", b'{"wall_s": 1.0, "torn')
    assert read_sessions(store).devices.up_s == pytest.approx(2 * 85)
    assert read_sessions(store).devices.cost == pytest.approx(2 * 0.085)


def test_what_a_lost_driver_did_last_is_missing_and_said_to_be() -> None:
    store, hand = open_store("memory://sessions-cut"), Hand()
    for epoch in (1, 2):
        totals = Totals(units=1, rows=1, devices=worked(hand, 3.60), clock=hand)
        log = log_in(store, epoch, clock=hand)
        log.show(totals)
        assert store.stat(f"attempts/epoch-{epoch:04d}-session.jsonl") is None
        totals.worker_up()
        log.show(totals)  # a session is known from its first worker on, however soon its driver is lost
        assert read_sessions(store).devices.unended == epoch
        if epoch == 2:
            totals.stop()
            log.flush(totals)
    sums = read_sessions(store).devices
    assert sums.unended == 1 and sums.up_s == pytest.approx(2 * 85)
    assert [text.partition("  ")[0] for _, text in cost_rows(sums, 50_000)] == ["at least 170 s", "at least 0.17"]
    running = dict(line.split(None, 1) for line in cost_lines([store], is_running=True))
    assert running["cost"].startswith("0.17"), "what still runs is no loss"
    whole = cost_rows(worked(hand, None).sums, 50_000)
    assert [text.partition("  ")[0] for _, text in whole] == ["85 s"]


def old_record() -> dict[str, object]:
    """What a version that did not count device time wrote."""
    effort = {"engine": dict.fromkeys(EngineStats.__slots__, 0), "wall_s": 0.0, "tail_s": 0.0}
    assert set(effort) == set(Effort.__slots__)
    tally = dict.fromkeys(Tally.__slots__, 0)
    return {"wall_s": 1.0, "worker_s": 1.0, "units_held": 0, "exact": True, "committed": tally, "effort": effort}


def test_a_worker_that_ended_twice_or_never_came_up_counts_once_or_not() -> None:
    clock = Hand()
    devices = DeviceTime(clock)
    devices.end_worker("never", lost=True)
    devices.up("w0")
    clock.now_s += 1.0
    devices.end_worker("w0")
    clock.now_s += 9.0
    devices.end_worker("w0", lost=True)
    devices.stop()
    assert devices.sums == DeviceSums(up_s=1.0)
