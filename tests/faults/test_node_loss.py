"""Nodes are lost, told to go, and join while a job runs, the head included: nothing is lost, nothing is there twice."""

import json
import os
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.failpoints import VARIABLE
from tests.faults.test_crash import drive
from tests.runs.jobs_of_tests import forked, logged, rows_of, write_rows, write_spec
from tests.runs.local_pool import without_ray

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROWS = 192
"""For one worker with one slot some 800 steps, for two 400 each; the first two units take about 40."""

NODE: dict = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture(params=[6.0])
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of clusters made later stand still for so many seconds, in which a notice, or a node's end, is seen."""
    monkeypatch.setenv(VARIABLE, f"worker.step=sleep:200:{request.param}")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    """A head of one CPU, which learns of another node's end within seconds."""
    from ray.cluster_utils import Cluster

    for name, value in {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 500, "initial_delay_ms": 500}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS, longest=40)


def begun(cluster, rows: Path) -> tuple:
    """A driver's process on the cluster, of whose units two are committed, and its folder."""
    spec = write_spec(rows.parent, rows=rows, batching={"max_rows": 1})
    process = forked(drive, cluster.address, str(spec), f"{spec}.log")
    data = spec.parent / "run" / "data"
    while not data.exists() or len(list(data.glob("unit-*"))) < 2:
        assert process.is_alive(), Path(f"{spec}.log").read_text()
        time.sleep(0.005)  # the condition is polled, not assumed
    return process, Path(f"{spec}.log")


def told_to_go(cluster, node, *, in_s: float) -> None:
    """As a watcher of spot machines tells Ray."""
    raylet = import_module("ray._raylet")
    reasons = import_module("ray.core.generated.autoscaler_pb2")
    gcs = raylet.GcsClient(address=cluster.address)
    end_ms = int((time.time() + in_s) * 1000)
    assert gcs.drain_node(node.node_id, reasons.DRAIN_NODE_REASON_PREEMPTION, "spot", end_ms) == (True, "")


def happened(run: Path) -> list[str]:
    """What the log of attempts has, in order."""
    lines = [line for path in sorted((run / "attempts").iterdir()) for line in path.read_text().splitlines()]
    return [json.loads(line).get("event", "") for line in lines]


def is_undisturbed(rows: Path) -> bool:
    """Whether the run is complete and has the rows of one that nothing happened to."""
    folder = rows.parent
    assert main(["verify", str(folder / "run")]) == 0
    with without_ray():
        assert main(["run", str(write_spec(folder, rows=rows, out="undisturbed")), "--quiet"]) == 0
    return rows_of(folder / "run").equals(rows_of(folder / "undisturbed"))


@pytest.mark.slow
def test_a_job_goes_on_without_a_node_that_is_lost(patience, cluster, rows):
    second = cluster.add_node(**NODE)
    process, log = begun(cluster, rows)
    cluster.remove_node(second, allow_graceful=False)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert is_undisturbed(rows)
    assert "worker_died" in happened(rows.parent / "run")


@pytest.mark.slow
def test_workers_leave_a_node_that_is_told_to_go_with_their_units_done(patience, cluster, rows):
    second = cluster.add_node(**NODE)
    process, log = begun(cluster, rows)
    told_to_go(cluster, second, in_s=600)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert is_undisturbed(rows)
    events = happened(rows.parent / "run")
    assert events.count("worker_leaving") == events.count("worker_left") == 1 and "worker_died" not in events


@pytest.mark.soak
@pytest.mark.parametrize("patience", [25.0], indirect=True)  # longer than another worker takes to come up
def test_a_node_that_joins_is_used(patience, cluster, rows):
    process, log = begun(cluster, rows)
    cluster.add_node(**NODE)
    process.join(300)
    assert process.exitcode == 0, log.read_text()
    assert happened(rows.parent / "run").count("worker_up") == 2
    assert is_undisturbed(rows)


@pytest.mark.slow
def test_a_driver_whose_own_node_is_told_to_go_exits_with_4_and_the_next_one_ends_the_job(patience, cluster, rows):
    process, log = begun(cluster, rows)
    told_to_go(cluster, cluster.head_node, in_s=20)
    process.join(60)
    assert process.exitcode == 4, log.read_text()
    with without_ray():
        assert main(["run", str(rows.parent / "run.yaml"), "--quiet"]) == 0
    assert is_undisturbed(rows)


RECONNECT_S = 3
"""Ray's own default is 60."""


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch):
    """A head without CPUs for workers, and a node with one, whose worker stands still for a while after some units."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(VARIABLE, "worker.step=sleep:200:15")
    patience = {"gcs_rpc_server_reconnect_timeout_s": RECONNECT_S}
    two_nodes = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "_system_config": patience})
    two_nodes.add_node(**NODE)
    yield two_nodes
    two_nodes.shutdown()


def units(run) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (run / "data").glob("unit-*")}


@pytest.mark.slow
def test_a_lost_head_ends_the_driver_with_1_and_the_same_command_repeats_no_committed_unit(two_nodes, tmp_path, capfd):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS, longest=40)
    process, log = begun(two_nodes, rows)
    (head,) = two_nodes.head_node.all_processes["gcs_server"]
    os.kill(head.process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode == 1, log.read_text()
    run = tmp_path / "run"
    before = units(run)
    assert len(before) >= 2 and not (run / "_SUCCESS").exists()
    command = ["run", str(tmp_path / "run.yaml"), "--quiet"]
    capfd.readouterr()
    assert main([*command, "--ray-address", two_nodes.address]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"draftmill: --ray-address: nothing listens at {two_nodes.address}")
    with without_ray():
        assert main(command) == 0
    assert before.items() <= units(run).items(), "a committed unit was written again"
    committed = {int(name.split("-")[1].split(".")[0]) for name in before}
    done = {event["unit"] for event in logged(run, "done", "0002")}
    assert done and not committed & done, "a committed unit was decoded again"
    assert is_undisturbed(rows)
