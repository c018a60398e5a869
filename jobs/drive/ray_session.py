"""Connects to an existing Ray cluster, or starts a Ray of our own on this machine; shuts down only a Ray that it started.

Ray's own log output is silenced; the driver reports what the user needs to know.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

import psutil

from draftmill.actors.ray.ray_inside import (
    ACCELERATORS,
    GRPC_CHANNEL,
    GRPC_REPLY,
    GRPC_REQUEST,
    NODE,
    NUM_CPUS,
    authentication_error,
    inside,
    require,
    silence_workers,
)
from draftmill.jobs.drive.allocation import NodeRoom
from draftmill.storage.errors import StoreError, UserError
from draftmill.version import ROOT

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where Ray's job API leaves the environment of a submitted job, as JSON."""

STARTS = 3
"""Attempts to start a Ray of our own: on a busy machine, Ray's start gives up after half a minute."""

_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")

_LOCAL_ENVIRONMENT = {
    # Ray's default limits suit an idle machine; raise all that can be raised. (Its wait for the node itself is fixed at 30 s.)
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_gcs_server_request_timeout_seconds": "180",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_raylet_client_num_connect_attempts": "180",
    "RAY_worker_register_timeout_seconds": "300",
    # A single machine listens on the loopback address alone, so a token would protect nothing.
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray raises the workers' niceness to 15; next to any other busy process they would then get no CPU time.
    "RAY_worker_niceness": "0",
    # A worker that requests no GPU must see no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


METRICS_PORT_VARIABLE = "DRAFTMILL_METRICS_PORT"
"""Names the port of a Ray of our own at which Prometheus finds the metrics; without it the port is random."""


class RayDidNotStart(StoreError):
    """A Ray of our own did not start in STARTS attempts."""


@contextmanager
def ray_session(
    address: str | None, *, num_cpus: int | None = None, note: Callable[[str], None] = lambda message: None
) -> Iterator[None]:
    """For the duration of the block, connect to `address`, or start a local Ray (with `num_cpus`, default all).

    A Ray that this process has already initialised is used as it is and left running. `note` receives progress messages.
    Raises UserError if nothing answers at the address, StoreError if a Ray of our own does not start.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    metrics_port()  # a wrong one is refused before anything starts
    with _own_sigterm():
        if address is None:
            _start_local(num_cpus, note)
        else:
            note(f"connecting to Ray at {address}")
            _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler: Ray installs its own, which would end the process with Ray's exit code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # Ray's reaction to a SIGTERM during its start
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _start_local(num_cpus: int | None, note: Callable[[str], None]) -> None:
    import ray

    for name, value in _LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Workers inherit neither our sys.path nor our working folder, only the PYTHONPATH that is set when Ray starts.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    note("starting Ray")
    for attempt in range(1, STARTS + 1):
        began_s = time.monotonic()
        try:
            with _only_what_jobs_use():
                _init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=128 * 2**20,  # it carries messages, never samples
                    _metrics_export_port=metrics_port(),
                )
            return
        except Exception as error:  # on a busy machine Ray raises a plain Exception
            with suppress(Exception):
                ray.shutdown()
            reason = " ".join(str(error).split()) or type(error).__name__
            took = f"attempt {attempt} of {STARTS}, {time.monotonic() - began_s:.0f} s"
            if attempt == STARTS:
                advice = (
                    "the machine may be too busy: run it again later, it resumes; or use --local, which needs no Ray"
                )
                raise RayDidNotStart(f"Ray did not start ({took}): {reason}; {advice}") from error
            note(f"Ray did not start ({took}): {reason}; trying again")


@contextmanager
def _only_what_jobs_use() -> Iterator[None]:
    """Start Ray without its web server, its autoscaler's monitor and its log monitor.

    A Ray that runs for one job needs none of them, and their imports take as long as the rest of its start: 2 s of wall time
    and 3 s of CPU time on two cores. `include_dashboard=False` still starts a web server (without pages), so this patches
    private methods of Ray. A Ray version without these methods starts everything.
    """
    from unittest.mock import patch

    node = inside(NODE)
    with ExitStack() as stack:
        for name in _UNUSED:
            if node is not None and inside(replace(NODE, name=f"{NODE.name}.{name}")) is not None:
                stack.enter_context(patch.object(node, name, return_value=None))
        yield


def metrics_port() -> int | None:
    """The port in METRICS_PORT_VARIABLE, None if it is not set; UserError if it is not a port."""
    text = os.environ.get(METRICS_PORT_VARIABLE)
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        raise UserError(f"{text!r} is not allowed; allowed: 1 to 65535", field=METRICS_PORT_VARIABLE)
    return int(text) if text else None


def _connect(address: str) -> None:
    if address == "auto" and JOB_CONFIG in os.environ:
        address = own_address() or address
    if check_reachable(address):
        check_head(address)
    # Our package alone is shipped, without anything beside it (an environment, runs, data). Ray matches the folder itself as ".".
    excludes = ["/[!.]*", "/.?*", "!/draftmill", "!/draftmill/**", "__pycache__"]
    code = None if _code_is_there() else {"working_dir": str(ROOT), "excludes": excludes}
    try:
        with warnings.catch_warnings(action="ignore"):  # Ray's client warns before it raises
            _init(address=address, runtime_env=code)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"no Ray cluster answers at {address}: {reason}", field="--ray-address") from None


def _code_is_there() -> bool:
    """Whether this process is a submitted job whose workers get its package, folder or image; Ray refuses a second folder."""
    mine: dict[str, Any] = {}
    with suppress(ValueError, AttributeError):
        mine = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    return any(mine.get(key) for key in ("py_modules", "working_dir", "image_uri", "container"))


def check_reachable(address: str | None, *, field: str = "--ray-address") -> bool:
    """Raise UserError within seconds if nothing listens at a host:port; Ray itself would retry forever.

    Returns whether it is a host:port; other addresses are Ray's to find.
    """
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return False
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"nothing listens at {address}: {error}", field=field) from None
    return True


def _init(**options: Any) -> None:
    import ray

    silence_workers()
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def local_nodes() -> list[NodeRoom]:
    """The one node that a Ray of our own would have on this machine."""
    manager, num_gpus = require(ACCELERATORS)("GPU"), 0
    if manager is not None:
        num_gpus = manager.get_current_node_num_accelerators()
        visible = manager.get_current_process_visible_accelerator_ids()
        num_gpus = num_gpus if visible is None else min(num_gpus, len(visible))
    return [NodeRoom(int(require(NUM_CPUS)()), num_gpus)]


def is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def cluster_nodes() -> list[NodeRoom]:
    """The nodes of the Ray we are connected to, without those that will be removed."""
    import ray

    from draftmill.actors.ray.notices import draining

    leaving = draining()
    return [
        NodeRoom(node["Resources"].get("CPU", 0.0), int(node["Resources"].get("GPU", 0)), node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    ]


_FLAG: Final = "--gcs-address="


def own_address() -> str | None:
    """The head (HOST:PORT) of the nearest raylet among this process's ancestors; None if there is none or it can't be seen.

    Ray's job API writes into RAY_ADDRESS the Ray that was started last on the machine. Where two run beside each other that may
    be the wrong one: workers would start there, and lack the shipped code. The raylet that started the driver knows its own head.
    """
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            with suppress(psutil.Error):  # another user's, or gone
                words = " ".join(process.cmdline()).split(" ")  # a process that renames itself leaves one string
                if words[0].rpartition("/")[2] == "raylet":
                    return next((word.removeprefix(_FLAG) for word in words if word.startswith(_FLAG)), None) or None
    return None


ANSWER_S = 20.0
"""A head on a busy machine may need some seconds; another kind of server fails at once, or never answers."""

_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"

_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"


def check_head(address: str, *, wait_s: float = ANSWER_S) -> None:
    """Raise UserError if what listens at host:port is not a Ray head, or refuses our token.

    One question, asked before Ray connects. Ray itself repeats it for 20 s (a wrong token) or for minutes (another server's
    port), with a line of log each time. Anything unexpected counts as fine: Ray's own connection then decides.
    """
    open_channel, request, reply = inside(GRPC_CHANNEL), inside(GRPC_REQUEST), inside(GRPC_REPLY)
    if open_channel is None or request is None or reply is None:
        return
    grpc: Any = import_module("grpc")
    try:
        with closing(open_channel(address, [("grpc.enable_http_proxy", 0)])) as channel:
            asked = {"request_serializer": request.SerializeToString, "response_deserializer": reply.FromString}
            channel.unary_unary(_QUESTION, **asked)(request(), timeout=wait_s)
    except authentication_error():
        raise UserError(f"the token can't be read: {_TOKEN} to the cluster's token", field="--ray-address") from None
    except grpc.RpcError as error:
        code, port = grpc.StatusCode, "the head's port is usually 6379, not that of the dashboard (8265)"
        problem = {
            code.UNAUTHENTICATED: f"the cluster at {address} refuses the token, or needs one: {_TOKEN}",
            code.UNAVAILABLE: f"no Ray cluster answers at {address}; {port}",
            code.DEADLINE_EXCEEDED: f"no Ray cluster answers at {address}; {port}",
        }.get(error.code())
        if problem is not None:
            raise UserError(problem, field="--ray-address") from None
