"""A Ray to run on: one of our own on this machine, or a cluster that is already there.

Only a Ray that was started here is shut down here. All of Ray's chatter is silenced; what matters reaches the user
through the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from storage.errors import StoreError, UserError

ROOT = Path(__file__).resolve().parents[2]
"""Where the packages lie: the checkout, or the environment's site-packages."""

PACKAGES = ("jobs", "actors", "decoders", "storage", "infra")

CONNECT_S = 5.0

OBJECT_STORE_BYTES = 128 * 2**20
"""Small: the object store carries messages, never samples."""

STARTS = 3
"""How often a Ray of our own is started at most: where others keep the machine busy, Ray gives up after half a minute."""

_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")

ADVICE = "the machine may be too busy, try later, or use --local, which needs no Ray"

_LOCAL_ENVIRONMENT = {
    # Ray's own limits suit an idle machine; all that can be raised is. (Its wait for the node itself is fixed at 30 s.)
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_gcs_server_request_timeout_seconds": "180",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_raylet_client_num_connect_attempts": "180",
    "RAY_worker_register_timeout_seconds": "300",
    # A single machine listens on the loopback address alone, so a token would protect nothing.
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray makes workers nicer than the driver by 15, and beside any other busy process they would then stand still.
    "RAY_worker_niceness": "0",
    # A worker that asks for no GPU must see none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


class RayDidNotStart(StoreError):
    """A Ray of our own did not start, however often it was tried."""


def _silence(message: str) -> None:
    return None


@contextmanager
def ray_session(
    address: str | None, *, num_cpus: int | None = None, note: Callable[[str], None] = _silence
) -> Iterator[None]:
    """Connect to `address`, or start a local Ray (of `num_cpus`, default all), for the time of the block.

    A Ray that this process has already initialised is used as it is and left running. `note` is told what is waited for. Raises
    UserError if there is nothing at the address, StoreError where a Ray of our own does not start.
    """
    import ray

    if ray.is_initialized():
        yield
        return
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
    """Ray takes SIGTERM for itself and would end the process with a code of its own: put back what was there."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # its answer to a SIGTERM while it starts
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def ray_is_ours_to_start(address: str | None) -> bool:
    """Whether `ray_session` would start a Ray, rather than use one that is there."""
    import ray

    return address is None and not ray.is_initialized()


def _start_local(num_cpus: int | None, note: Callable[[str], None]) -> None:
    for name, value in _LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Workers see neither our sys.path nor our working folder's: only what stands in PYTHONPATH when Ray starts.
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
                    object_store_memory=OBJECT_STORE_BYTES,
                )
            return
        except Exception as error:  # on a busy machine Ray gives up with just that
            _clear_away()
            reason = " ".join(str(error).split()) or type(error).__name__
            took = f"attempt {attempt} of {STARTS}, {time.monotonic() - began_s:.0f} s"
            if attempt == STARTS:
                raise RayDidNotStart(f"Ray did not start ({took}): {reason}; {ADVICE}") from error
            note(f"Ray did not start ({took}): {reason}; trying again")


@contextmanager
def _only_what_jobs_use() -> Iterator[None]:
    """Start Ray without its web server, its autoscaler's monitor and its log monitor.

    A Ray that lives as long as one job has no use for them, and their imports take as long as the rest of its start: 2 s of wall
    and 3 s of CPU on two cores. `include_dashboard=False` still starts a web server (without pages), so these are private names
    of Ray; a version that has them no more starts everything.
    """
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in _UNUSED if hasattr(Node, name)}
    for name in kept:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def _start_nothing(*_: Any, **__: Any) -> None:
    return None


def _clear_away() -> None:
    """End what a start that failed has left."""
    import ray

    with suppress(Exception):
        ray.shutdown()


def _connect(address: str) -> None:
    check_reachable(address)
    # The packages travel as one folder, whatever else lies beside them (an environment, runs, data).
    # (Ray matches the folder itself as ".", which must not be excluded.)
    excludes = ["/[!.]*", "/.?*", *(f"!/{name}{rest}" for name in PACKAGES for rest in ("", "/**")), "__pycache__"]
    try:
        _init(address=address, runtime_env={"working_dir": str(ROOT), "excludes": excludes})
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"no Ray cluster answers at {address}: {reason}", field="--ray-address") from None


def check_reachable(address: str | None) -> None:
    """Ray itself would go on trying for ever; a host:port that nobody listens on is a UserError within seconds."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"nobody listens at {address}: {error}", field="--ray-address") from None


def _init(**options: Any) -> None:
    import ray
    from ray._private import worker

    # log_to_driver=False alone lets "(raylet) a worker died" and node dumps through; this private flag does not.
    worker._worker_logs_enabled = False
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def local_size() -> tuple[int, int]:
    """Whole CPUs and GPUs that a Ray of our own will have on this machine."""
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.utils import get_num_cpus

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return int(get_num_cpus()), 0
    num_gpus = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return int(get_num_cpus()), num_gpus if visible is None else min(num_gpus, len(visible))


def cluster_size() -> tuple[int, int]:
    """Whole CPUs and GPUs of the Ray we are connected to."""
    import ray

    resources = ray.cluster_resources()
    return int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
