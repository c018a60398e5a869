"""What a job asks of a cluster's autoscaler: nodes for the workers that its queue needs, and fewer once the queue is short.

Ray keeps the last request until another one replaces it, for the whole cluster. So it is made only if it has changed, only where
there is an autoscaler, and it is taken back at the end.

Ray has no public call for whether there is one, or which nodes it may bring, and its versions differ: newer ones report the
autoscaler's node groups; in older ones only the names of the nodes' types tell an autoscaler from Ray's own reporter, which names
a type after each node. What cannot be found out counts as no autoscaler: a job then uses the nodes that are there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.ray.ray_inside import CLUSTER_CONFIG, CLUSTER_STATUS, IS_AUTOSCALER_V2, KV_GET, inside
from draftmill.jobs.driving.nodes import NodeRoom
from draftmill.jobs.spec.worker_shape import WorkerShape

Bundles = list[dict[str, float]]
Selectors = list[dict[str, str]]
Request = Callable[[Bundles, Selectors], None]


@dataclass(slots=True)
class Demand:
    """Asks for room. `allocate_for` gives the workers that so many units need on all nodes that the autoscaler may bring."""

    allocate_for: Callable[[int], Allocation]
    request: Request
    _asked: tuple[Bundles, Selectors] | None = None

    def need(self, units: int) -> None:
        """So many units are left."""
        allocation = self.allocate_for(units) if units else None
        self._ask(*bundles_of(allocation) if allocation else ([], []))

    def close(self) -> None:
        """The job needs nothing any more."""
        self._ask([], [])

    def _ask(self, bundles: Bundles, selectors: Selectors) -> None:
        if (bundles, selectors) != (self._asked or ([], [])):
            with suppress(Exception):  # the cluster may not answer now: the next call asks again, and the run goes on
                self.request(bundles, selectors)
                self._asked = bundles, selectors


def bundles_of(allocation: Allocation) -> tuple[Bundles, Selectors]:
    """The resources of all workers of an allocation, whether they run already or not, and the labels of their nodes."""
    bundles: Bundles = []
    selectors: Selectors = []
    for resources, count in zip(allocation.kinds, allocation.counts, strict=True):
        bundles += [_bundle(resources) for _ in range(count)]
        selectors += [dict(resources.labels) for _ in range(count)]
    return bundles, selectors


def _bundle(resources: WorkerResources) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}


def request_of_ray(bundles: Bundles, selectors: Selectors) -> None:
    """Ask the autoscaler of the Ray that we are connected to."""
    from ray.autoscaler.sdk import request_resources

    rest: dict[str, Any] = {"bundle_label_selectors": selectors} if any(selectors) else {}
    request_resources(bundles=bundles, **rest)


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
    """Nodes of one worker each, in the order in which allocation.py serves the kinds."""
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
