"""The pool on a real Ray: workers that have no model, and workers of two processes, which end together."""

import os
import signal
import time
from types import ModuleType, SimpleNamespace

import pytest

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.messages import PoolEvent, Receipt, WorkerLoaded, WorkerLost, WorkerReported, WorkUnit
from draftmill.actors.ray.pool import RayPool, is_running
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import make_job, resolve
from draftmill.storage.stores.store import open_store
from tests.actors.fakes import ENDLESS, LOSES_DEVICE, FakeWorker, work
from tests.actors.group_processes import followers
from tests.runs.causal_jobs import job_spec, results_of, run_here, save_model

pytestmark = pytest.mark.ray

JOB = SimpleNamespace(on_ray=lambda resources: None)
ALLOCATION = Allocation((WorkerResources(cpus=0, gpus=0, threads=1),), (1,))


@pytest.fixture
def pool(ray_session: ModuleType):
    pool = RayPool(JOB, ALLOCATION, worker_class=FakeWorker)
    yield pool
    pool.close()


def until(pool: RayPool, wanted: type) -> list[PoolEvent]:
    events: list[PoolEvent] = []
    for _ in range(200):
        events += pool.poll(0.2)
        if any(isinstance(item, wanted) for item in events):
            return events
    raise AssertionError(f"nothing came but {events}")


def receipts(pool: RayPool, count: int) -> list[int]:
    units: list[int] = []
    for _ in range(200):
        for item in pool.poll(0.2):
            if isinstance(item, WorkerReported):
                units += [answer.unit for answer in item.report.answers if isinstance(answer, Receipt)]
        if len(units) >= count:
            return units
    raise AssertionError(f"only {units}")


def test_a_worker_comes_up_takes_units_and_reports_each(pool):
    pool.start("w0")
    (up,) = until(pool, WorkerLoaded)
    assert isinstance(up, WorkerLoaded) and up.pid != os.getpid()
    for unit in range(2):
        pool.assign("w0", work(unit, 2))
    assert sorted(receipts(pool, 2)) == [0, 1]


def test_a_killed_worker_is_reported_dead_in_one_line(pool):
    pool.start("w0")
    (up,) = until(pool, WorkerLoaded)
    assert isinstance(up, WorkerLoaded)
    pool.assign("w0", work(ENDLESS, 1))
    until(pool, WorkerReported)  # of the knock
    until(pool, WorkerReported)  # of the unit
    os.kill(up.pid, signal.SIGKILL)
    died = until(pool, WorkerLost)[-1]
    assert isinstance(died, WorkerLost) and died.worker == "w0" and "\n" not in died.reason and not died.idle


def test_the_death_of_a_worker_that_had_nothing_to_do_is_no_fault_of_its_next_unit(pool):
    pool.start("w0")
    (up,) = until(pool, WorkerLoaded)
    assert isinstance(up, WorkerLoaded)
    os.kill(up.pid, signal.SIGKILL)
    while is_running(up.node, up.pid):
        time.sleep(0.01)
    pool.assign("w0", work(0, 2))
    pool.assign("w0", work(1, 2))
    died = until(pool, WorkerLost)[-1]
    assert isinstance(died, WorkerLost) and died.worker == "w0" and died.idle


def test_a_unit_that_is_revoked_before_it_was_sent_never_runs(pool):
    pool.start("w0")
    until(pool, WorkerLoaded)
    pool.assign("w0", work(0, 2))
    pool.revoke("w0", 0)
    pool.assign("w0", work(1, 2))
    assert receipts(pool, 1) == [1]
    assert not any(item.report.answers for _ in range(3) for item in pool.poll(0.2) if isinstance(item, WorkerReported))


def test_a_worker_that_dies_of_its_unit_is_reported_and_others_go_on(pool):
    for name in ("w0", "w1"):
        pool.start(name)
    ups = 0
    while ups < 2:
        ups += sum(isinstance(item, WorkerLoaded) for item in pool.poll(0.2))
    pool.assign("w0", work(99, 2))
    pool.assign("w1", work(1, 2))
    events = until(pool, WorkerLost)
    assert [item.worker for item in events if isinstance(item, WorkerLost)] == ["w0"]


def test_a_worker_whose_device_is_lost_ends_and_is_reported_as_that(pool):
    pool.start("w0")
    until(pool, WorkerLoaded)
    pool.assign("w0", work(LOSES_DEVICE, 1))
    died = until(pool, WorkerLost)[-1]
    assert isinstance(died, WorkerLost) and died.device and not died.idle and "illegal memory access" in died.reason


def test_a_worker_that_cannot_be_built_is_reported_dead_with_the_reason(pool):
    pool.start("w9")
    (died,) = until(pool, WorkerLost)
    assert isinstance(died, WorkerLost) and "the model is not there" in died.reason


def test_a_revoked_unit_makes_room_for_the_next(pool):
    pool.start("w0")
    until(pool, WorkerLoaded)
    pool.assign("w0", work(ENDLESS, 1))
    pool.revoke("w0", ENDLESS)
    pool.assign("w0", work(1, 2))
    assert receipts(pool, 1) == [1]
    # A turn that was under way may still report, but nothing of the revoked unit and no second receipt.
    late = [item for _ in range(3) for item in pool.poll(0.2)]
    assert all(isinstance(item, WorkerReported) and not item.report.answers for item in late)


def test_a_closed_pool_has_no_process_left(pool):
    pool.start("w0")
    (up,) = until(pool, WorkerLoaded)
    assert isinstance(up, WorkerLoaded) and is_running(up.node, up.pid)
    pool.assign("w0", work(ENDLESS, 1))
    pool.close()
    assert not is_running(up.node, up.pid)


def test_released_workers_go_on_in_another_pool_as_the_same_processes(pool):
    for name in ("w0", "w1"):
        pool.start(name)
    ups: list[WorkerLoaded] = []
    while len(ups) < 2:
        ups += [item for item in until(pool, WorkerLoaded) if isinstance(item, WorkerLoaded)]
    for number, name in enumerate(("w0", "w1")):
        pool.assign(name, work(number, rows=2))
    assert sorted(receipts(pool, 2)) == [0, 1]
    os.kill(ups[0].pid, signal.SIGKILL)
    actors = pool.release()
    assert pool.poll(0.0) == [] and len(actors) == 1, "a dead one is not handed over"
    other = RayPool(JOB, ALLOCATION, worker_class=FakeWorker, early=actors)
    try:
        other.start("again")
        (up,) = [item for item in until(other, WorkerLoaded) if isinstance(item, WorkerLoaded)]
        assert (up.worker, up.pid) == ("again", ups[1].pid)
        other.assign("again", work(5, rows=2))
        assert receipts(other, 1) == [5]
    finally:
        other.close()
    assert not is_running(up.node, up.pid)


@pytest.mark.slow
def test_a_worker_that_does_not_rest_in_time_is_ended(pool, monkeypatch):
    monkeypatch.setattr("draftmill.actors.ray.pool.REST_S", 0.2)
    pool.start("w0")
    (up,) = [item for item in until(pool, WorkerLoaded) if isinstance(item, WorkerLoaded)]
    os.kill(up.pid, signal.SIGSTOP)
    assert pool.release() == []
    deadline_s = time.monotonic() + 60
    while is_running(up.node, up.pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(up.node, up.pid)


ROWS = [{"id": f"r{number}", "prompt": f"row {number}"} for number in range(16)]


def news_until(pool: RayPool, wanted: type):
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        for item in pool.poll(0.2):
            if isinstance(item, wanted):
                return item
            if isinstance(item, WorkerReported) and any(isinstance(one, wanted) for one in item.report.answers):
                return item
            assert not isinstance(item, WorkerLost), item
    raise AssertionError(f"no {wanted}")


def ends(node: str, pid: int) -> bool:
    for _ in range(300):
        if not is_running(node, pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_killed_process_ends_its_group_and_another_one_decodes_its_unit(ray_session, tmp_path):
    save_model(tmp_path / "model", ends=[2])
    spec = job_spec(tmp_path, ROWS, workers={"gpus_per_model": 2, "gpus": 0, "cpus": 2, "count": 1})
    store = open_store(spec.output.path)
    resolved = resolve(spec, store)
    plan = make_plan(resolved, store, Display())
    first, *others = [WorkUnit(one.unit, one.unit, one.rows, one.tokens, 1, 1, 0, one.rows) for one in plan.sizes()]
    pool = RayPool(
        make_job(resolved, plan), Allocation((WorkerResources(cpus=2, gpus=0, threads=1, processes=2),), (1,))
    )
    try:
        pool.start("w0")
        up = news_until(pool, WorkerLoaded)
        (second,) = followers()
        assert second != up.pid and is_running(up.node, second)
        os.kill(second, signal.SIGKILL)
        pool.assign("w0", first)
        died = news_until(pool, WorkerLost)
        assert died.worker == "w0"
        assert ends(up.node, up.pid)

        pool.start("w1")  # has room only if Ray has back what the first group had
        up = news_until(pool, WorkerLoaded)
        (second,) = followers()
        for unit in (first, *others):
            pool.assign("w1", unit)
            news_until(pool, Receipt)
    finally:
        pool.close()
    assert ends(up.node, up.pid) and ends(up.node, second)
    found = results_of(spec)
    alone = run_here(job_spec(tmp_path, ROWS, output={"path": str(tmp_path / "alone"), "unit_rows": 8}))
    assert len(found) == len(ROWS)
    assert {key: row["text"] for key, row in found.items()} == {key: row["text"] for key, row in alone.items()}
