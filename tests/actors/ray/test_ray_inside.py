"""Names of Ray that are not its API: the installed version has them, one file has them, and no job fails by one that is gone."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from draftmill.actors.ray import ray_inside
from draftmill.actors.ray.notices import draining, node_of
from draftmill.actors.ray.ray_inside import RayName, inside, require, silence_workers
from draftmill.jobs.config.sections import WorkerShape
from draftmill.jobs.drive import ray_session
from draftmill.jobs.drive.allocation import possible_nodes
from draftmill.jobs.drive.ray_session import check_head, local_nodes
from draftmill.storage.errors import UserError

ROOT = Path(__file__).parents[3]
NAMES = {name: value for name, value in vars(ray_inside).items() if isinstance(value, RayName)}


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_ray_has_every_name(name):
    assert require(NAMES[name]) is not None


def test_no_other_file_names_what_is_not_rays_api():
    private = re.compile(r"ray\.(_\w+|\w+\._\w+|experimental|core|autoscaler\.v2)\b")
    files = [
        path for folder in ("actors", "jobs", "storage", "decoders", "infra") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    assert [path.name for path in files if private.search(path.read_text())] == ["ray_inside.py"]


@pytest.fixture
def another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of Ray that has moved all that is not its API."""
    real = import_module

    def moved(name: str):
        if name in {one.module for one in NAMES.values()}:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr("draftmill.actors.ray.ray_inside.import_module", moved)
    monkeypatch.setattr(ray_inside, "_missed", set())


def starts() -> None:
    with ray_session._only_what_jobs_use():
        pass


WITHOUT: dict[str, tuple] = {
    "notices": (draining, {}, "nobody is notified that a node will be removed"),
    "nodes": (lambda: node_of(None), None, "nobody is notified that a node will be removed"),
    "autoscaler": (
        lambda: possible_nodes([WorkerShape()], []),
        None,
        "the cluster counts as one without an autoscaler",
    ),
    "head": (lambda: check_head("127.0.0.1:1"), None, "a wrong port or token is noticed later"),
    "start": (starts, None, "a Ray of our own starts slower"),
    "lines": (silence_workers, None, "Ray prints lines of its own"),
}


@pytest.mark.parametrize(("use", "answer", "said"), WITHOUT.values(), ids=WITHOUT)
def test_a_name_that_is_gone_is_said_once_and_the_job_goes_on(another_ray, capsys, use, answer, said):
    assert use() == answer == use()
    lines = capsys.readouterr().err.splitlines()
    assert lines and len(set(lines)) == len(lines)
    assert all(re.match(r"draftmill: Ray \S+ has no ray\.\S+: ", line) and said in line for line in lines)


def test_a_name_without_which_nothing_is_right_is_a_clear_refusal(another_ray):
    with pytest.raises(UserError, match=r"^Ray \S+ has no ray\._private\.\S+: .* install a version that has it"):
        local_nodes()


def test_a_method_that_is_gone_is_noticed_too(capsys):
    assert inside(RayName("ray._private.node", "Node.start_nothing", "it starts")) is None
    assert "has no ray._private.node.Node.start_nothing: it starts" in capsys.readouterr().err
