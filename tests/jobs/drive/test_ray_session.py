"""Connecting to a cluster: our code is shipped, unless the process is a submitted job that came with it."""

import json

import pytest

from draftmill.jobs.drive import ray_session


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
