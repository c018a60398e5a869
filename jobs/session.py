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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import StoreError, UserError

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie: the checkout, or the environment's site-packages."""

PACKAGES = ("jobs", "actors", "decoders", "storage", "infra")

CONNECT_S = 5.0

OBJECT_STORE_BYTES = 128 * 2**20
"""Small: the object store carries messages, never samples."""

_LOCAL_ENVIRONMENT = {
    # A single machine listens on the loopback address alone, so a token would protect nothing.
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray makes workers nicer than the driver by 15, and beside any other busy process they would then stand still.
    "RAY_worker_niceness": "0",
    # A worker that asks for no GPU must see none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}


@contextmanager
def ray_session(address: str | None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Connect to `address`, or start a local Ray (of `num_cpus`, default all), for the time of the block.

    A Ray that this process has already initialised is used as it is and left running. Raises UserError if there is
    nothing at the address.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    with _own_sigterm():
        if address is None:
            _start_local(num_cpus)
        else:
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


def _start_local(num_cpus: int | None) -> None:
    for name, value in _LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Workers see neither our sys.path nor our working folder's: only what stands in PYTHONPATH when Ray starts.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        _init(address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    except Exception as error:  # on a busy machine Ray gives up with just that
        raise StoreError(f"Ray did not start: {error}; run it again to go on") from error


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


def cluster_size() -> tuple[int, int]:
    """Whole CPUs and GPUs of the Ray we are connected to."""
    import ray

    resources = ray.cluster_resources()
    return int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
