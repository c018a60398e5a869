"""A whole node is lost while a job runs on it and on another: the job goes on, nothing is lost, nothing is there twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from tests.jobs_of_tests import forked, rows_of, write_rows, write_spec
from tests.local_pool import without_ray
from tests.test_crash import drive

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(600)]

ROWS = 64


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head and a second node of one CPU each, which learn of each other's end within seconds."""
    from ray.cluster_utils import Cluster

    for name, value in {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 500, "initial_delay_ms": 500}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    yield cluster, cluster.add_node(**options)
    cluster.shutdown()


def test_a_job_goes_on_without_a_node_that_is_lost(cluster: tuple[Any, Any], tmp_path: Path):
    nodes, second = cluster
    rows = write_rows(tmp_path / "rows.jsonl", ROWS, longest=40)
    spec = write_spec(tmp_path, rows=rows, batching={"max_rows": 1})
    process = forked(drive, nodes.address, str(spec), f"{spec}.log")
    data = tmp_path / "run" / "data"
    while not data.exists() or len(list(data.glob("unit-*"))) < 2:
        assert process.is_alive(), Path(f"{spec}.log").read_text()
        time.sleep(0.005)  # the condition is polled, not assumed
    nodes.remove_node(second, allow_graceful=False)
    process.join(300)
    assert process.exitcode == 0, Path(f"{spec}.log").read_text()
    assert main(["verify", str(tmp_path / "run")]) == 0
    with without_ray():
        assert main(["run", str(write_spec(tmp_path, rows=rows, out="undisturbed")), "--quiet"]) == 0
    assert rows_of(tmp_path / "run").equals(rows_of(tmp_path / "undisturbed"))
    attempts = "".join(path.read_text() for path in (tmp_path / "run" / "attempts").iterdir())
    assert "worker_died" in attempts
