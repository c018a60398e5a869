"""Workers with two processes on a real Ray: the texts of one process; a killed process ends its group, and the unit goes on."""

import os
import signal
import time

import pytest

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.messages import Receipt, WorkerLoaded, WorkerLost, WorkerReported, WorkUnit
from draftmill.actors.ray.pool import RayPool, is_running
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import make_job, resolve
from draftmill.storage.stores.store import open_store
from tests.actors.group_processes import followers
from tests.runs.causal_jobs import job_spec, results_of, run_here, save_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

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
