"""What listens at --ray-address is asked once before Ray connects: heads, refused tokens, other servers, silence."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

import pytest
from ray.exceptions import AuthenticationError

from draftmill.jobs.drive.ray_session import check_head, check_reachable
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
