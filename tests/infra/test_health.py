"""The health check of the images: on processes that run, stand still or are dead, and on answers of a Ray node's agent."""

from types import SimpleNamespace

import psutil
import pytest

from draftmill.infra.health import problem
from tests.jobs.remote.fake_cluster import answering

RAYLET = "/x/ray/core/src/ray/raylet/raylet"


def run(monkeypatch: pytest.MonkeyPatch, *processes: tuple) -> None:
    """Let there be these processes: the name, the command line and the status of each."""
    found = [
        SimpleNamespace(pid=42, info=dict(zip(("name", "cmdline", "status"), each, strict=True))) for each in processes
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda names: found)


def test_a_container_without_ray_is_healthy(monkeypatch):
    run(monkeypatch)
    assert problem() is None
    run(monkeypatch, ("python", ["python", "/bin/draftmill", "run"], "sleeping"), ("some child", None, "zombie"))
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
def test_a_process_that_stands_still_or_is_dead_is_named(state, command, name, monkeypatch):
    run(monkeypatch, (name, command, state))
    assert "process 42" in str(problem())


@pytest.mark.parametrize(
    ("code", "text", "said"), [(200, "success", None), (200, "failed", "answers 'failed'"), (503, "", "answers 503")]
)
def test_a_ray_node_is_as_healthy_as_its_agent_says(monkeypatch, code, text, said):
    run(monkeypatch, ("raylet", [RAYLET, "--node_ip_address=127.0.0.1"], "sleeping"))
    with answering(code, text) as address:
        agent = f"http://{{host}}:{address.rpartition(':')[2]}/healthz"
        found = problem(agent=agent)
    assert found is None if said is None else said in str(found)


def test_a_ray_without_an_agent_is_judged_by_its_processes(monkeypatch):
    run(monkeypatch, ("raylet", [RAYLET, "--node_ip_address=127.0.0.1"], "sleeping"))
    assert problem(agent="http://{host}:1/healthz") is None
