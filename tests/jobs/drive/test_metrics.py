"""A session's metrics and device time: reported per receipt or second, and every second of a worker has one purpose."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.actors.messages import Effort, Failure, Receipt, Tally, TurnReport, WorkerLost
from draftmill.decoders.base import EngineStats
from draftmill.jobs.drive.driver import Driver, StopFlag
from draftmill.jobs.drive.metrics import METRICS, Metric, MetricsWatcher
from draftmill.jobs.drive.run_log import RunLog, read_sessions
from draftmill.jobs.drive.totals import DeviceSums, Totals, device_time_rows, hours_text, purposes_of
from draftmill.jobs.results.runs import device_time_lines
from draftmill.jobs.schedule.events import Assign, Tick
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.stores.store import Store, open_store
from tests.jobs.schedule.reports import worker_up


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Exporter:
    """Stands for Ray's metrics: the last value of each series, and how often it was told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.calls: Counter[str] = Counter()
        self.observed: list[float] = []

    def make(self, metric: Metric) -> Any:
        exporter, declared = self, {"run", "decoder", *metric.labels}

        class Series:
            def told(self, tags: dict[str, str]) -> tuple[str, tuple[str, ...]]:
                assert set(tags) == declared and all(isinstance(value, str) for value in tags.values())
                exporter.calls[metric.name] += 1
                return metric.name, tuple(tags[name] for name in metric.labels)

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert metric.kind == "counter" and value > 0  # Ray refuses others
                key = self.told(tags)
                exporter.values[key] = exporter.values.get(key, 0) + value

            def set(self, value: float, tags: dict[str, str]) -> None:
                assert metric.kind == "gauge"
                exporter.values[self.told(tags)] = value

            def observe(self, value: float, tags: dict[str, str]) -> None:
                assert metric.kind == "histogram"
                self.told(tags)
                exporter.observed.append(value)

        return Series()


def receipt(unit: int) -> Receipt:
    tally = Tally(
        rows=4,
        ok=3,
        failed=1,
        prompt_tokens=7,
        new_tokens=20,
        nfe=8,
        nfe_draft=5,
        iterations=4,
        proposed=12,
        accepted=9,
    )
    committed: Any = SimpleNamespace(exact=True)
    return Receipt(unit, unit, "w0", "n", committed, tally, {"too_long": 1}, spent_s=2.0, commit_s=0.25)


def turn(*answers: Receipt | Failure, steps: int) -> TurnReport:
    engine = EngineStats(steps=steps, slot_steps=8 * steps, active_slot_steps=6 * steps, committed=3 * steps)
    return TurnReport(answers, Effort(engine, 1.0, 0.0), Tally())


def at_work(clock: Hand) -> tuple[Scheduler, Totals]:
    """Four units, one of them held by the only worker."""
    scheduler = Scheduler([UnitSize(unit, 4, 10) for unit in range(4)], workers=1)
    scheduler.on(Tick(0.0))
    commands = scheduler.on(worker_up("w0"))
    assert [type(command) for command in commands] == [Assign]
    totals = Totals(units=4, rows=16, clock=clock)
    totals.worker_up("w0", {"load_s": 5.0})
    return scheduler, totals


def test_every_metric_is_reported_with_the_value_that_was_counted():
    clock, exporter = Hand(), Exporter()
    scheduler, totals = at_work(clock)
    watcher = MetricsWatcher("job", "assd", make=exporter.make, clock=clock)
    report = turn(receipt(0), receipt(1), Failure(9, 2, "w0", "INFRA", "store", "store", "no"), steps=10)
    totals.add_report("w0", report)
    watcher.reported("w0", report)
    for unit in range(2):
        totals.add_receipt(receipt(unit))
    clock.now_s += 5.0
    totals.still_s = 5.0
    watcher.look(totals, scheduler)
    values = exporter.values
    assert {metric.name for metric in METRICS} - {name for name, _ in values} == {
        "draftmill_commit_seconds",
        "draftmill_worker_deaths",
    }
    assert exporter.observed == [0.25, 0.25]
    assert {labels[0]: value for (name, labels), value in values.items() if name == "draftmill_samples"} == {
        "ok": 6,
        "failed": 2,
    }
    assert {labels[0]: value for (name, labels), value in values.items() if name == "draftmill_units"} == {
        "done": 0,
        "held": 1,
        "resting": 0,
        "suspected": 0,
        "waiting": 3,
    }
    expected = {
        "running": 1, "samples_planned": 16, "samples_done": 8, "tokens": 40, "prompt_tokens": 14, "decoded_tokens": 30,
        "nfe": 16, "nfe_draft": 10, "drafts_proposed": 24, "drafts_accepted": 18, "slots": 8, "slots_used": 6,
        "seconds_without_progress": 5, "device_seconds": 10,
    }  # fmt: skip
    assert {name: values[f"draftmill_{name}", ()] for name in expected} == expected
    assert values["draftmill_errors", ("too_long",)] == 2 and values["draftmill_unit_failures", ("store",)] == 1
    assert values["draftmill_workers", ("up",)] == 1 and values["draftmill_workers", ("loading",)] == 0
    scheduler.on(WorkerLost("w0", "killed"))
    totals.worker_ended("w0", died=True)
    totals.stop()
    watcher.over(totals, scheduler)
    assert values["draftmill_worker_deaths", ()] == 1 and values["draftmill_running", ()] == 0
    assert values["draftmill_workers", ("up",)] == values["draftmill_slots", ()] == 0
    assert values["draftmill_device_seconds", ()] == 10, "what was told is not told again"


def test_metrics_are_reported_once_a_second_however_often_workers_report():
    clock, exporter = Hand(), Exporter()
    scheduler, totals = at_work(clock)
    watcher = MetricsWatcher("job", "assd", make=exporter.make, clock=clock)
    for _ in range(40):  # ten seconds
        clock.now_s += 0.25
        for _ in range(20):
            totals.add_report("w0", turn(steps=1))
        watcher.look(totals, scheduler)
    assert max(exporter.calls.values()) <= 5 * 10  # the units have five states, everything else is one series
    assert exporter.calls["draftmill_decoded_tokens"] == 10
    assert exporter.values["draftmill_decoded_tokens", ()] > 3 * 20 * 36


def test_a_worker_that_no_longer_reports_uses_no_slots():
    clock, exporter = Hand(), Exporter()
    scheduler, totals = at_work(clock)
    watcher = MetricsWatcher("job", "assd", make=exporter.make, clock=clock)
    watcher.reported("w0", turn(steps=1))
    watcher.look(totals, scheduler)
    assert exporter.values["draftmill_slots_used", ()] == 6
    clock.now_s += 11.0
    watcher.look(totals, scheduler)
    assert exporter.values["draftmill_slots_used", ()] == 0 and exporter.values["draftmill_slots", ()] == 8


def test_an_exporter_that_fails_is_told_nothing_more_and_says_so_once():
    def broken(metric: Metric) -> Any:
        raise RuntimeError("no exporter")

    clock, notes = Hand(), list[str]()
    scheduler, totals = at_work(clock)
    display, pool = SimpleNamespace(note=notes.append), SimpleNamespace()
    watchers = [MetricsWatcher("job", "assd", make=broken, clock=clock)]
    driver = Driver(scheduler, pool, display, totals, StopFlag(), watchers=watchers)  # type: ignore[arg-type]
    for _ in range(3):
        driver.watch(lambda watcher: watcher.reported("w0", turn(steps=1)))
        driver.watch(lambda watcher: watcher.look(totals, scheduler))
        clock.now_s += 1.0
    driver.watch(lambda watcher: watcher.over(totals, scheduler))
    assert notes == ["metrics end here, the run continues: RuntimeError: no exporter"]


def log_in(store: Store, epoch: int = 1, *, clock=time.monotonic) -> RunLog:
    """The log of a driver of this run directory."""
    log = RunLog(clock=clock)
    log.attach(store, epoch, "job")
    return log


def two_at_work(clock: Hand) -> Totals:
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
    totals = two_at_work(clock)
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
        totals = two_at_work(hand)
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
