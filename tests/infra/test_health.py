"""The health check of the images: on processes that run, stand still or are dead, and on answers of a Ray node's agent."""

from types import SimpleNamespace

import psutil
import pytest

from draftmill.infra.health import problem
from tests.jobs.remote.fake_cluster import answering

RAYLET = "/x/ray/core/src/ray/raylet/raylet"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch):
    """Adds one to the processes that there are."""
    there: list[SimpleNamespace] = []
    monkeypatch.setattr(psutil, "process_iter", lambda names: there)

    def add(pid: int, status: str, *command: str, name: str = "python") -> None:
        info = {"name": name, "cmdline": list(command), "status": status}
        there.append(SimpleNamespace(pid=pid, info=info))

    return add


def test_a_container_without_ray_is_healthy(process):
    assert problem() is None
    process(1, "sleeping", "/usr/local/bin/python", "/usr/local/bin/draftmill", "run", "job.yaml")
    process(7, "zombie", name="some child")
    assert problem() is None


@pytest.mark.parametrize(
    ("state", "command", "name"),
    [
        ("stopped", ["/usr/local/bin/python", "/usr/local/bin/draftmill", "run"], "draftmill"),
        ("stopped", [RAYLET, "--node_ip_address=10.0.0.7"], "raylet"),
        ("zombie", [], "raylet"),
        ("zombie", [], "gcs_server"),
    ],
)
def test_a_process_that_stands_still_or_is_dead_is_named(state, command, name, process):
    process(42, state, *command, name=name)
    assert "process 42" in str(problem())


@pytest.mark.parametrize(
    ("code", "text", "said"), [(200, "success", None), (200, "failed", "answers 'failed'"), (503, "", "answers 503")]
)
def test_a_ray_node_is_as_healthy_as_its_agent_says(process, code, text, said):
    process(9, "sleeping", RAYLET, "--node_ip_address=127.0.0.1", name="raylet")
    with answering(code, text) as address:
        agent = f"http://{{host}}:{address.rpartition(':')[2]}/healthz"
        found = problem(agent=agent)
    assert found is None if said is None else said in str(found)


def test_a_ray_without_an_agent_is_judged_by_its_processes(process):
    process(9, "sleeping", RAYLET, "--node_ip_address=127.0.0.1", name="raylet")
    assert problem(agent="http://{host}:1/healthz") is None
