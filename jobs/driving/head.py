"""Asks a cluster's head one question before Ray connects, so that a wrong port or token is said in one line, and soon.

Ray itself repeats the question for 20 s (a wrong token) or for minutes (another server's port), with a line of log each time.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from draftmill.actors.ray.ray_inside import GRPC_CHANNEL, GRPC_REPLY, GRPC_REQUEST, authentication_error, inside
from draftmill.storage.errors import UserError

ANSWER_S = 20.0
"""A head on a busy machine may need some seconds; another kind of server fails at once, or never answers."""

_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"

_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"


def check_head(address: str, *, field: str = "--ray-address", wait_s: float = ANSWER_S) -> None:
    """Raise UserError if what listens at host:port is not a Ray head, or refuses our token.

    Anything unexpected counts as fine: Ray's own connection then decides.
    """
    open_channel, request, reply = inside(GRPC_CHANNEL), inside(GRPC_REQUEST), inside(GRPC_REPLY)
    if open_channel is None or request is None or reply is None:
        return
    try:
        grpc: Any = import_module("grpc")
    except ImportError:
        return
    try:
        channel = open_channel(address, [("grpc.enable_http_proxy", 0)])
        ask = channel.unary_unary(
            _QUESTION,
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            ask(request(), timeout=wait_s)
        finally:
            channel.close()
    except authentication_error():
        raise UserError(f"the token can't be read: {_TOKEN} to the cluster's token", field=field) from None
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise UserError(
                f"the cluster at {address} refuses the token, or needs one: {_TOKEN}", field=field
            ) from None
        if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            raise UserError(
                f"no Ray cluster answers at {address}; the head's port is usually 6379, not that of the dashboard (8265)",
                field=field,
            ) from None
