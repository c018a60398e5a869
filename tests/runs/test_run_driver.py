"""The driver's loop against workers in this process: a pool without Ray, a memory store, real unit files."""

import uuid

import pytest

from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.messages import (
    HomeLeaving,
    NodeLeaving,
    PoolEvent,
    Receipt,
    TurnReport,
    WorkerLoaded,
    WorkerLost,
    WorkerReported,
    WorkUnit,
)
from draftmill.actors.rows.samples import Sample, tally_of
from draftmill.jobs.drive.driver import TOO_MANY, Driver, StopFlag, Watcher
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.run_log import RunLog, read_sessions
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.schedule.events import Finish
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.runs.commit import commit_unit, done_units
from draftmill.storage.runs.records import read_results, table_from_rows
from draftmill.storage.stores.store import Store, open_store
from tests.actors.fakes import FakeClerk, FakeDecoder
from tests.jobs.drive.test_metrics import log_in

ROWS = 4


class StoreClerk(FakeClerk):
    """Commits real unit files with the fewest columns; `poison(unit, row)` kills the worker that opens such a row."""

    def __init__(self, store: Store, units: int, poison) -> None:
        super().__init__({unit: [1 + (unit + row) % 3 for row in range(ROWS)] for unit in range(units)})
        self.store = store
        self.poison = poison

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        spared = {row for verdict in unit.verdicts for row in range(verdict.start, verdict.stop)}
        if any(self.poison(unit.unit, row) for row in range(unit.start, unit.stop) if row not in spared):
            raise SystemExit  # stands for a segmentation fault: the pool below turns it into a death
        return super().open_unit(unit)

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        guilty = {row for verdict in unit.verdicts for row in range(verdict.start, verdict.stop)}
        rows = [
            {
                "id": f"{unit.unit}:{row}",
                "unit": unit.unit,
                "pass": unit.pass_,
                "attempt": unit.attempt,
                "status": "failed" if row in guilty else "ok",
            }
            for row in range(unit.start, unit.stop)
        ]
        committed = None
        if not unit.probe:
            table = table_from_rows(rows)
            committed = commit_unit(
                self.store,
                unit=unit.unit,
                table=table,
                fingerprint="f",
                code_version="0",
            )
        return Receipt(unit.lease, unit.unit, "w", "n", committed, tally_of(samples))


class FakePool:
    """Workers that decode in `poll`, one step each."""

    def __init__(self, unit_io) -> None:
        self.unit_io = unit_io
        self.runners: dict[str, UnitRunner] = {}
        self.events: list[PoolEvent] = []
        self.deaths = 0

    def start(self, name: str) -> None:
        self.runners[name] = UnitRunner(FakeDecoder(), self.unit_io(), worker=name)
        self.events.append(WorkerLoaded(name, "node", 1))

    def assign(self, name: str, unit: WorkUnit) -> None:
        self.runners[name].add(unit)

    def revoke(self, name: str, lease: int) -> None:
        self.runners[name].drop(lease)

    def kill(self, name: str) -> None:
        self.runners.pop(name).close()

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        events, self.events = self.events, []
        for name in list(self.runners):
            events += self.turn(name)
        return events

    def turn(self, name: str) -> list[PoolEvent]:
        items = self.runners[name].step()
        if any(getattr(item, "error", "").startswith("SystemExit") for item in items):
            self.kill(name)
            self.deaths += 1
            return [WorkerLost(name, "segmentation fault")]
        effort, decoded = self.runners[name].take_effort()
        return [WorkerReported(name, TurnReport(tuple(items), effort, decoded))]


def driver(
    store: Store,
    *,
    units: int = 6,
    workers: int = 2,
    poison=lambda unit, row: False,
    log: RunLog | None = None,
) -> Driver:
    done = done_units(store)
    left = [UnitSize(unit, ROWS, 10 - unit) for unit in range(units) if unit not in done]
    return Driver(
        scheduler=Scheduler(left, workers=workers, limits=Limits(rest_s=0.0)),
        pool=FakePool(lambda: StoreClerk(store, units, poison)),  # type: ignore[arg-type]
        display=Display(log),
        totals=Totals(units=units, rows=units * ROWS, units_before=len(done), rows_before=len(done) * ROWS),
        stop=StopFlag(),
    )


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4()}")


def statuses(store: Store) -> dict[str, str]:
    rows = [row for table in read_results(store) for row in table.select(["id", "status"]).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows), "a row is there twice"
    return {row["id"]: row["status"] for row in rows}


def test_every_unit_is_committed_and_counted_once(store):
    job = driver(store)
    assert job.run() == Finish("done")
    assert list(job.committed.listed) == list(done_units(store)) == list(range(6))
    assert (job.totals.units_done, job.totals.committed.rows, job.totals.rows_done) == (6, 24, 24)


def test_a_row_that_kills_workers_is_quarantined_and_its_neighbours_are_ok(store):
    job = driver(store, poison=lambda unit, row: (unit, row) == (2, 3))
    assert job.run() == Finish("done")
    found = statuses(store)
    assert len(found) == 24 and [name for name, status in found.items() if status == "failed"] == ["2:3"]
    assert isinstance(job.pool, FakePool) and job.pool.deaths <= 8


def test_a_stop_drains_and_the_next_driver_does_the_rest(store):
    first = driver(store, workers=1)
    first.stop.set("SIGTERM")
    assert first.run().how == "drained"
    second = driver(store, workers=1)
    assert second.run() == Finish("done")
    assert len(statuses(store)) == 24
    assert set(first.committed.listed) | set(second.committed.listed) == set(range(6))
    assert not set(first.committed.listed) & set(second.committed.listed)


@pytest.mark.parametrize(("signals", "grace_s"), [(1, 3.0), (2, 1e9)])
def test_a_unit_that_does_not_end_is_given_up_after_the_grace_or_a_second_signal(store, signals, grace_s):
    now = iter(range(1000))
    job = driver(store, units=1, workers=1)
    job.clock = lambda: float(next(now))
    job.grace_s = grace_s
    pool = job.pool

    def nothing_ends(timeout_s: float) -> list[PoolEvent]:
        for _ in range(signals):
            job.stop.set("SIGINT")
        pool.poll = lambda timeout_s: []  # type: ignore[method-assign]
        return [WorkerLoaded("w0", "node", 1)]

    pool.poll = nothing_ends  # type: ignore[method-assign]
    assert job.run() == Finish("drained", "the grace period is over")


def test_a_driver_whose_node_is_to_go_drains_in_the_time_that_is_left_and_the_signal_that_follows_is_its_first(store):
    job = driver(store, workers=1)
    pool, seconds = job.pool, iter([[HomeLeaving(7.0)], [HomeLeaving(7.0)]])
    real = pool.poll
    pool.poll = lambda timeout_s: [*next(seconds, []), *real(timeout_s)]  # type: ignore[method-assign]
    assert job.run().how == "drained"
    assert (job.grace_s, job.stop.reason, job.stop.urgent) == (7.0, "this node is being drained", False)
    urgent = []
    for _ in range(2):
        job.stop.set("SIGTERM")
        urgent.append(job.stop.urgent)
    assert (urgent, job.stop.reason) == ([False, True], "this node is being drained")
    assert 0 < len(job.committed) < 6
    assert driver(store).run() == Finish("done") and len(statuses(store)) == 24


def test_a_worker_whose_node_is_to_go_is_replaced_and_counts_as_no_death(store):
    log = log_in(store)
    job = driver(store, workers=2, log=log)
    pool, notices = job.pool, iter([[], [NodeLeaving("w0", None)], [NodeLeaving("w1", 30.0)]])
    real = pool.poll
    pool.poll = lambda timeout_s: [*real(timeout_s), *next(notices, [])]  # type: ignore[method-assign]
    assert job.run() == Finish("done")
    assert isinstance(pool, FakePool) and sorted(pool.runners) == ["w2", "w3"]
    assert (job.totals.deaths, job.totals.workers, len(statuses(store))) == (0, 2, 24)
    log.write_out(job.totals)
    assert store.get("attempts/epoch-0001-part-0000.jsonl").decode().count('"event": "worker_left"') == 2


def test_machines_that_join_are_used_and_the_same_room_is_told_once(store):
    job = driver(store, workers=1, units=40)
    now, room = iter(range(0, 90_000, 3)), iter([1, 1, 3, 3, 0, 2])
    job.clock = lambda: float(next(now))
    job.room = lambda: next(room, 2)
    assert job.run() == Finish("done")
    assert isinstance(job.pool, FakePool) and sorted(job.pool.runners) == ["w0", "w1", "w2"]
    assert len(statuses(store)) == 160


def test_a_driver_that_stood_still_does_not_hold_that_against_its_workers(store):
    job = driver(store, workers=2)
    now = iter([0.0, 1.0, *range(5000, 9000)])
    job.clock = lambda: float(next(now))  # behind the second look an hour and more has passed
    still_s = list[float]()
    watcher = Watcher()
    watcher.look = lambda totals, scheduler: still_s.append(totals.still_s)  # type: ignore[method-assign]
    job.watchers = [watcher]
    assert job.run() == Finish("done") and max(still_s) < 60, "nor does it count as a stall"
    assert isinstance(job.pool, FakePool) and len(job.pool.runners) == 2 and job.totals.deaths == 0


def test_a_job_of_which_too_much_has_failed_is_drained_and_says_so(store):
    job = driver(store, units=30, workers=1)
    job.hopeless = lambda failed: len(job.committed) > 3
    assert job.run() == Finish("hopeless", TOO_MANY)
    assert 4 < len(done_units(store)) < 10


def test_what_happened_is_in_the_log_and_the_sessions_add_up(store):
    log = log_in(store)
    job = driver(store, poison=lambda unit, row: (unit, row) == (0, 0), log=log)
    job.run()
    log.write_out(job.totals)
    text = store.get("attempts/epoch-0001-part-0000.jsonl").decode()
    assert text.count('"event": "done"') == 6 and '"event": "quarantined"' in text and "segmentation fault" in text
    assert read_sessions(store).committed == job.totals.committed
