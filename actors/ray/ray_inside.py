"""What is used of Ray beside its public API: every such name is here, with what becomes of a job where a version has moved it.

There is no public call for any of it; Ray's own libraries use the same names. tests/actors/ray/test_ray_inside.py says whether
the installed version has them, and that no other file names one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from draftmill.storage.errors import UserError


@dataclass(frozen=True, slots=True)
class RayName:
    """A name in a module of Ray's, and what a job has to do without it."""

    module: str
    name: str
    without: str


_NOTICES = "nobody is notified that a node will be removed"
_GROUPS = "the cluster counts as one without an autoscaler"
_QUESTION = "a wrong port or token is noticed later"

DRAINING = RayName("ray._private.state", "state.get_draining_nodes", _NOTICES)
ACTORS = RayName("ray._private.state", "actors", _NOTICES)
CLUSTER_CONFIG = RayName("ray._private.state", "state.get_cluster_config", _GROUPS)
IS_AUTOSCALER_V2 = RayName("ray.autoscaler.v2.utils", "is_autoscaler_v2", _GROUPS)
CLUSTER_STATUS = RayName("ray.autoscaler.v2.sdk", "get_cluster_status", _GROUPS)
KV_GET = RayName("ray.experimental.internal_kv", "_internal_kv_get", _GROUPS)
GRPC_CHANNEL = RayName("ray._private.grpc_utils", "init_grpc_channel", _QUESTION)
GRPC_REQUEST = RayName("ray.core.generated.gcs_service_pb2", "GetClusterIdRequest", _QUESTION)
GRPC_REPLY = RayName("ray.core.generated.gcs_service_pb2", "GetClusterIdReply", _QUESTION)
NODE = RayName("ray._private.node", "Node", "a Ray of our own starts slower, with parts that no job uses")
WORKER_LOGS = RayName("ray._private.worker", "_worker_logs_enabled", "Ray prints lines of its own")
DO_REQUEST = RayName("ray.job_submission", "JobSubmissionClient._do_request", "requests to a cluster may wait for ever")
ACCELERATORS = RayName("ray._private.accelerators", "get_accelerator_manager_for_resource", "GPUs can't be counted")
NUM_CPUS = RayName("ray._private.utils", "get_num_cpus", "CPUs can't be counted")

_missed: set[RayName] = set()


def inside(what: RayName) -> Any | None:
    """The object with this name; None, with one warning, where this version of Ray has none."""
    try:
        return _look_up(what)
    except (ImportError, AttributeError):
        if what not in _missed:
            _missed.add(what)
            print(f"draftmill: {_missing(what)}", file=sys.stderr)
        return None


def require(what: RayName) -> Any:
    """The object with this name, which nothing can replace; UserError where this version of Ray has none."""
    try:
        return _look_up(what)
    except (ImportError, AttributeError):
        raise UserError(f"{_missing(what)}; install a version that has it: see constraints.txt") from None


def authentication_error() -> tuple[type[Exception], ...]:
    """What Ray raises for a refused token, to be caught; nothing where a version knows no tokens yet."""
    kind = getattr(import_module("ray.exceptions"), "AuthenticationError", None)
    return () if kind is None else (kind,)


def silence_workers() -> None:
    """Let Ray print nothing of its processes. `log_to_driver=False` alone leaves "(raylet) a worker died" and node dumps."""
    if inside(WORKER_LOGS) is not None:
        setattr(import_module(WORKER_LOGS.module), WORKER_LOGS.name, False)


def _look_up(what: RayName) -> Any:
    target: Any = import_module(what.module)
    for part in what.name.split("."):
        target = getattr(target, part)
    return target


def _missing(what: RayName) -> str:
    version = getattr(sys.modules.get("ray"), "__version__", "here")
    return f"Ray {version} has no {what.module}.{what.name}: {what.without}"
