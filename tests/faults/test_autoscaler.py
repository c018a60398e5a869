"""A cluster without any node for workers: Ray's autoscaler brings nodes for the queue, and takes them away when it is done.

The nodes are further raylets of this machine, which Ray's own stand-in for a cloud starts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from draftmill.storage.failpoints import VARIABLE
from tests.faults.test_crash import drive
from tests.faults.test_node_loss import happened, is_undisturbed
from tests.runs.jobs_of_tests import forked, write_rows, write_spec

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
EMPTY: dict = {
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in ("initialization_commands", "setup_commands", "cluster_synced_files")},
    **{key: [] for key in ("head_setup_commands", "worker_setup_commands", "rsync_exclude", "rsync_filter")},
    **{key: [] for key in ("head_start_ray_commands", "worker_start_ray_commands")},
}
"""Keys that Ray's launcher fills in where it starts a cluster."""

HEAD_ID = "f" * 51 + "00000"
"""What the stand-in takes for the head's id."""

NODES = 2

CONFIG: dict = {
    "cluster_name": "test",
    "max_workers": NODES,
    "idle_timeout_minutes": 0.4,
    "upscaling_speed": 9.0,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "one-cpu": {
            "resources": {"CPU": 1, "object_store_memory": 80_000_000},
            "node_config": {},
            "max_workers": NODES,
        },
    },
}
PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}


def free_port() -> int:
    """A port below those that Ray gives to its workers."""
    taken = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    return next(port for port in range(7000 + os.getpid() % 1000, 10_000) if port not in taken)


def end(folder: Path) -> None:
    """Kill the processes of the Ray in this folder."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in part for part in process.info["cmdline"] or []):
            process.kill()


@pytest.fixture
def address():
    """A head without CPUs, and an autoscaler that may add nodes of one CPU."""
    folder = Path(tempfile.mkdtemp(prefix="as", dir="/tmp"))  # Ray's sockets need a short path
    address = f"127.0.0.1:{free_port()}"
    (folder / "cluster.json").write_text(json.dumps(EMPTY | CONFIG | {"provider": PROVIDER | {"gcs_address": address}}))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        VARIABLE: "worker.step=sleep:40:20",  # workers stand still while others come up
    }
    options = [f"--autoscaling-config={folder / 'cluster.json'}", f"--temp-dir={folder / 'ray'}", "--num-cpus=0"]
    options += ["--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}", "--include-dashboard=false"]
    options += [
        "--object-store-memory=100000000",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
    ]
    ray = Path(sys.executable).parent / "ray"
    try:
        subprocess.run(
            [ray, "start", "--head", *options], env=environment, check=True, capture_output=True, timeout=120
        )
        yield address
    finally:
        end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def nodes(address: str) -> int:
    """How many nodes are alive, the head included."""
    raylet = import_module("ray._raylet")
    found = raylet.GcsClient(address=address).get_all_node_info(timeout=30).values()
    return sum(node.state == 0 for node in found)


def test_the_autoscaler_brings_nodes_for_the_queue_and_takes_them_away_again(address, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 48, longest=24)
    assert nodes(address) == 1
    spec = write_spec(tmp_path, rows=rows, batching={"max_rows": 1}, workers={"count": "auto"})
    process = forked(drive, address, str(spec), f"{spec}.log")
    most = 0
    while process.is_alive():
        most = max(most, nodes(address))
        time.sleep(1.0)
    assert process.exitcode == 0, Path(f"{spec}.log").read_text()
    assert most > 2, "one worker waits for a node; another node comes only because it is asked for"
    assert happened(tmp_path / "run").count("worker_up") >= NODES
    while nodes(address) > 1:
        time.sleep(1.0)  # the condition is polled; the test's own limit ends it
    assert is_undisturbed(rows)
