"""The head of a cluster is lost while a job runs: Ray ends the driver, and the same command goes on where it was."""

import json
import os
import signal

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.failpoints import VARIABLE
from tests.faults.test_node_loss import NODE, ROWS, begun, is_undisturbed
from tests.runs.jobs_of_tests import write_rows
from tests.runs.local_pool import without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

RECONNECT_S = 3
"""Ray's own default is 60."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch):
    """A head without CPUs for workers, and a node with one, whose worker stands still for a while after some units."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(VARIABLE, "worker.step=sleep:200:15")
    patience = {"gcs_rpc_server_reconnect_timeout_s": RECONNECT_S}
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "_system_config": patience})
    cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


def units(run) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (run / "data").glob("unit-*")}


def units_done(run, epoch: int) -> set[int]:
    """The units that a session's log of attempts calls done."""
    lines = [line for path in run.glob(f"attempts/epoch-{epoch:04d}-part-*") for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    return {event["unit"] for event in events if event["event"] == "done"}


def test_a_lost_head_ends_the_driver_with_1_and_the_same_command_repeats_no_committed_unit(cluster, tmp_path, capfd):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS, longest=40)
    process, log = begun(cluster, rows)
    (head,) = cluster.head_node.all_processes["gcs_server"]
    os.kill(head.process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode == 1, log.read_text()
    run = tmp_path / "run"
    before = units(run)
    assert len(before) >= 2 and not (run / "_SUCCESS").exists()
    command = ["run", str(tmp_path / "run.yaml"), "--quiet"]
    capfd.readouterr()
    assert main([*command, "--ray-address", cluster.address]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"draftmill: --ray-address: nothing listens at {cluster.address}")
    with without_ray():
        assert main(command) == 0
    assert before.items() <= units(run).items(), "a committed unit was written again"
    committed = {int(name.split("-")[1].split(".")[0]) for name in before}
    assert units_done(run, 2) and not committed & units_done(run, 2), "a committed unit was decoded again"
    assert is_undisturbed(rows)
