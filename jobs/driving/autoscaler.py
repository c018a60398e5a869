"""Whether the cluster has an autoscaler, and which nodes it may bring.

Ray has no public call for either, and its versions differ: newer ones report the autoscaler's node groups; in older ones only the
names of the nodes' types tell an autoscaler from Ray's own reporter, which names a type after each node. What cannot be found out
counts as no autoscaler: a job then uses the nodes that are there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from draftmill.actors.ray.ray_inside import CLUSTER_CONFIG, CLUSTER_STATUS, IS_AUTOSCALER_V2, KV_GET, inside
from draftmill.jobs.driving.nodes import NodeRoom
from draftmill.jobs.spec.worker_shape import WorkerShape

MOST_NODES = 1000
"""Nodes of one group, or workers of a kind with `count: auto`, that are asked for at most."""

_REPORTED = re.compile(r"node_[0-9a-f]{40,}")
"""The type of a node that no autoscaler started."""

_STATUS = "__autoscaling_status"


def possible_nodes(shapes: Sequence[WorkerShape], now: Sequence[NodeRoom]) -> list[NodeRoom] | None:
    """All nodes that the cluster may have at a time, None if it has no autoscaler. `now` are the nodes that it has.

    The labels of nodes that do not exist yet are unknown. If their number and resources are, too, there is one node for each
    worker that the spec allows, of just its size; the autoscaler's own limit then decides how many come.
    """
    get_cluster_config = inside(CLUSTER_CONFIG)
    if get_cluster_config is None:
        return None
    try:
        config = get_cluster_config()
        if config is not None and config.node_group_configs:
            return [room for group in config.node_group_configs for room in _rooms(group)]
        return _fitting(shapes, now) if any(not _REPORTED.fullmatch(name) for name in _node_types()) else None
    except (AttributeError, TypeError, RuntimeError):  # another version of Ray
        return None


def _rooms(group: Any) -> list[NodeRoom]:
    room = NodeRoom(group.resources.get("CPU", 0), int(group.resources.get("GPU", 0)), None)
    return [room] * (MOST_NODES if group.max_count < 0 else min(group.max_count, MOST_NODES))


def _fitting(shapes: Sequence[WorkerShape], now: Sequence[NodeRoom]) -> list[NodeRoom]:
    """Nodes of one worker each, in the order in which crew.py serves the kinds."""
    served = sorted(shapes, key=lambda shape: shape.count == "auto")
    return [room for shape in served for room in [_just(shape, now)] * _most(shape)]


def _most(shape: WorkerShape) -> int:
    return MOST_NODES if shape.count == "auto" else shape.count


def _just(shape: WorkerShape, now: Sequence[NodeRoom]) -> NodeRoom:
    has_gpus = any(node.gpus for node in now if node.has(shape.labels.items()))
    return NodeRoom(shape.cpus, math.ceil(shape.gpus_if(has_gpus)), None)


def _node_types() -> Iterable[str]:
    """The types of the nodes that an autoscaler of either version of Ray's knows."""
    is_autoscaler_v2 = inside(IS_AUTOSCALER_V2)
    if is_autoscaler_v2 is None:
        return []
    return [name for name in (_types_of_v2() if is_autoscaler_v2() else _types_of_v1()) if name]


def _types_of_v1() -> Iterable[str]:
    kv_get = inside(KV_GET)
    if kv_get is None:
        return []
    with suppress(ValueError):
        report = json.loads(kv_get(_STATUS) or b"{}").get("autoscaler_report") or {}
        return [*report.get("active_nodes", {}), *report.get("pending_launches", {})]
    return []


def _types_of_v2() -> Iterable[str]:
    import ray

    get_cluster_status = inside(CLUSTER_STATUS)
    if get_cluster_status is None:
        return []
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return [node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]]
