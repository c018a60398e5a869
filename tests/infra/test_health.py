"""The health check of the images: on processes that run, stand still or are dead, and on answers of a Ray node's agent."""

import pytest

from draftmill.infra.health import problem
from tests.jobs.remote.fake_cluster import answering


def process(proc, pid: int, state: str, *command: str, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join(command).encode() + (b"\0" if command else b""))
    (folder / "stat").write_bytes(f"{pid} ({name}) {state} 1 1 1 0 -1 4194560".encode())


def test_a_container_without_ray_is_healthy(tmp_path):
    assert problem(tmp_path) is None
    process(tmp_path, 1, "S", "/usr/local/bin/python", "/usr/local/bin/draftmill", "run", "job.yaml")
    process(tmp_path, 7, "Z", name="some child")
    assert problem(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "command", "name"),
    [
        ("T", ["/usr/local/bin/python", "/usr/local/bin/draftmill", "run"], "draftmill"),
        ("T", ["/x/ray/core/src/ray/raylet/raylet", "--node_ip_address=10.0.0.7"], "raylet"),
        ("Z", [], "raylet"),
        ("Z", [], "gcs_server"),
    ],
)
def test_a_process_that_stands_still_or_is_dead_is_named(state, command, name, tmp_path):
    process(tmp_path, 42, state, *command, name=name)
    assert "process 42" in str(problem(tmp_path))


@pytest.mark.parametrize(
    ("code", "text", "said"), [(200, "success", None), (200, "failed", "answers 'failed'"), (503, "", "answers 503")]
)
def test_a_ray_node_is_as_healthy_as_its_agent_says(tmp_path, code, text, said):
    process(tmp_path, 9, "S", "/x/ray/core/src/ray/raylet/raylet", "--node_ip_address=127.0.0.1", name="raylet")
    with answering(code, text) as address:
        agent = f"http://{{host}}:{address.rpartition(':')[2]}/healthz"
        found = problem(tmp_path, agent=agent)
    assert found is None if said is None else said in str(found)


def test_a_ray_without_an_agent_is_judged_by_its_processes(tmp_path):
    process(tmp_path, 9, "S", "/x/ray/core/src/ray/raylet/raylet", "--node_ip_address=127.0.0.1", name="raylet")
    assert problem(tmp_path, agent="http://{host}:1/healthz") is None
