"""Connecting to a cluster: a submitted job finds its own among its ancestors, and code is shipped unless it came with it."""

import json
import shlex
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from draftmill.jobs.drive import ray_session
from draftmill.jobs.drive.ray_session import own_address


def test_the_nearest_raylet_names_the_head_and_another_program_does_not(monkeypatch):
    def found(*commands: list[str]) -> str | None:
        parents = [SimpleNamespace(cmdline=lambda words=words: words) for words in commands]
        monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
        return own_address()

    raylet = [
        "/somewhere/ray/core/src/ray/raylet/raylet",
        "--raylet_socket_name=/tmp/socket",
        "--gcs-address=10.0.0.5:6379",
    ]
    farther, supervisor = ["raylet", "--gcs-address=10.0.0.9:6379"], ["ray::JobSupervisor", ""]
    assert found(["sh", "-c", "draftmill"], supervisor, raylet, farther) == "10.0.0.5:6379"
    assert found(supervisor, [], ["bash", "--gcs-address=10.0.0.9:6379"]) is None
    assert found(raylet[:2]) is None


def test_it_is_found_over_real_processes():
    inner = "from draftmill.jobs.drive.ray_session import own_address; print(own_address())"
    outer = "import subprocess, sys; subprocess.run(['sh', '-c', sys.argv[1]], check=True)"
    # The first word of a command line is what the caller says it is.
    argv = ["raylet", "-c", outer, shlex.join([sys.executable, "-c", inner]), "--gcs-address=10.0.0.5:6379"]
    said = subprocess.run(argv, executable=sys.executable, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "10.0.0.5:6379"


@pytest.mark.parametrize(
    ("environment", "ships"),
    [
        (None, True),
        ({}, True),
        ({"env_vars": {"A": "b"}}, True),
        ({"working_dir": "gcs://_ray_pkg_1.zip"}, False),
        ({"py_modules": ["gcs://_ray_pkg_1.zip"]}, False),
        ({"image_uri": "draftmill:1"}, False),
    ],
)
def test_the_code_is_shipped_unless_the_submitted_job_has_a_folder_or_an_image(environment, ships, monkeypatch):
    given = []
    monkeypatch.setattr(ray_session, "_init", lambda **options: given.append(options["runtime_env"]))
    monkeypatch.delenv(ray_session.JOB_CONFIG, raising=False)
    if environment is not None:
        monkeypatch.setenv(ray_session.JOB_CONFIG, json.dumps({"runtime_env": environment, "metadata": {}}))
    ray_session._connect("auto")
    assert (given[0] is not None) == ships
