"""Connecting to a cluster: what listens at an address, which cluster runs a submitted job, and whether code is shipped."""

import json
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import psutil
import pytest
from ray.exceptions import AuthenticationError

from draftmill.jobs.drive import ray_session
from draftmill.jobs.drive.ray_session import check_head, check_reachable, own_address
from draftmill.storage.errors import UserError
from tests.jobs.remote.fake_cluster import answering

grpc = import_module("grpc")
GetClusterIdReply = import_module("ray.core.generated.gcs_service_pb2").GetClusterIdReply


@contextmanager
def head(answer):
    """A server that answers the question about the cluster's id as Ray's head does."""
    method = grpc.unary_unary_rpc_method_handler(
        lambda request, context: answer(context), response_serializer=GetClusterIdReply.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", {"GetClusterId": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_head_that_answers_is_left_to_ray():
    with head(lambda context: GetClusterIdReply(cluster_id=b"1")) as address:
        assert check_reachable(address)
        check_head(address)


def test_a_refused_token_is_said_with_the_variables_to_set():
    def refuse(context) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing or incorrect")

    with head(refuse) as address, pytest.raises(UserError) as caught:
        check_head(address)
    assert str(caught.value) == (
        f"--ray-address: the cluster at {address} refuses the token, or needs one: set RAY_AUTH_MODE=token, and "
        "RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
    )


def test_an_answer_that_is_not_understood_is_left_to_ray():
    def refuse(context) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "another version")

    with head(refuse) as address:
        check_head(address)


def test_the_port_of_a_dashboard_is_not_that_of_the_head():
    with (
        answering(404, "") as address,
        pytest.raises(UserError, match=rf"no Ray cluster answers at {address}; the head's port is usually 6379"),
    ):
        check_head(address)


def test_a_server_that_is_silent_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UserError, match="no Ray cluster answers"):
        check_head(f"127.0.0.1:{listener.getsockname()[1]}", wait_s=0.3)


def test_a_token_that_can_not_be_read_is_said_without_its_path(monkeypatch):
    def refused(address: str, options: object) -> None:
        raise AuthenticationError("RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /secret")

    monkeypatch.setattr("ray._private.grpc_utils.init_grpc_channel", refused)
    with pytest.raises(UserError, match="the token can't be read: set RAY_AUTH_MODE=token") as caught:
        check_head("127.0.0.1:1")
    assert "/secret" not in str(caught.value)


@pytest.mark.parametrize("address", [None, "auto", "local", "ray://head:10001"])
def test_only_a_host_with_a_port_is_asked(address):
    assert not check_reachable(address)


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
