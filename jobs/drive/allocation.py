"""How many workers to run and the resources of each, on the nodes that a cluster has or that its autoscaler may bring.

Ray keeps the last request to its autoscaler until another one replaces it, for the whole cluster. So it is made only if it has
changed, only where there is an autoscaler, and it is taken back at the end.

Ray has no public call for whether there is one, or which nodes it may bring, and its versions differ: newer ones report the
autoscaler's node groups; in older ones only the names of the nodes' types tell an autoscaler from Ray's own reporter, which names
a type after each node. What cannot be found out counts as no autoscaler: a job then uses the nodes that are there.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.ray.ray_inside import CLUSTER_CONFIG, CLUSTER_STATUS, IS_AUTOSCALER_V2, KV_GET, inside
from draftmill.jobs.config.sections import WorkerShape
from draftmill.storage.errors import UserError


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """The resources of a node, whether free or not, and its labels; None if they are not known, then any selector may match."""

    cpus: float
    gpus: int
    labels: Mapping[str, str] | None = field(default_factory=dict)

    def has(self, selector: Iterable[tuple[str, str]]) -> bool:
        """Whether the node is one that a label selector selects, as Ray reads it."""
        labels = self.labels
        return labels is None or all(_selects(rule, labels.get(key)) for key, rule in selector)

    @property
    def shown(self) -> str:
        """The node in messages; without the labels that Ray gives to every node."""
        labels = [
            f"{key}={value}" for key, value in sorted((self.labels or {}).items()) if not key.startswith("ray.io/")
        ]
        gpus = f", {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"({self.cpus:g} CPU{'s' * (self.cpus != 1)}{gpus}{''.join(f', {label}' for label in labels)})"


def _selects(rule: str, value: str | None) -> bool:
    if rule.startswith("!"):
        return not _selects(rule[1:], value)
    if rule.startswith("in("):
        return value in [name.strip() for name in rule[3:-1].split(",")]
    return value == rule


MOST_SHOWN = 6


def _format_nodes(nodes: Iterable[NodeRoom]) -> str:
    """Nodes in messages, equal ones together: `2 x (4 CPUs, 1 GPU), (8 CPUs)`."""
    kinds = Counter(node.shown for node in nodes).most_common()
    parts = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds[:MOST_SHOWN]]
    more = f" and {len(kinds) - MOST_SHOWN} more kinds" if len(kinds) > MOST_SHOWN else ""
    return ", ".join(parts) + more if parts else "no nodes"


# ---- workers


PARAMETERS_PER_THREAD = 25_000_000
"""Matrix products of a smaller model end before a second thread starts; on a busy machine they then wait for that thread."""

_EPSILON = 1e-6


def allocate(
    shapes: Sequence[WorkerShape], nodes: Sequence[NodeRoom], *, units: int, device: str = "auto", listed: bool = False
) -> Allocation:
    """How many workers of each kind run on these nodes, at most one per unit, and the resources of each kind.

    A worker fits on a node if the node alone has its CPUs and GPUs; a fraction of a GPU never spans two of them. Kinds with a
    `count` are served first, then the others fill what is left, in their order. `gpus: auto` is one GPU each, or one for each
    process of a split model, if a node that the labels select has any. The CPUs of a node are divided among its workers as
    torch threads, and those of a worker among its processes. Raises UserError if no worker of any kind fits, with the reason
    and the nodes, or if `device` is a GPU and workers have none. `listed` says that the spec has a list, so that errors name
    the kind.
    """
    free = [_Free(node) for node in nodes]
    kinds = [_resources(shape, nodes) for shape in shapes]
    for index, resources in enumerate(kinds):
        _check_device(resources, device, nodes)
        _check_alone(resources, nodes, _field(index, listed=listed), raises=not listed)
    counts = [0] * len(shapes)
    used: list[list[_Free]] = [[] for _ in shapes]
    for index in sorted(range(len(shapes)), key=lambda i: shapes[i].count == "auto"):
        count = shapes[index].count
        most = min(units if count == "auto" else count, units - sum(counts))
        used[index] = _take_room(kinds[index], free, max(most, 0 if sum(counts) else 1))
        counts[index] = len(used[index])
    if not sum(counts):
        reasons = [f"{_field(i, listed=True)}: {_reason(resources, nodes)}" for i, resources in enumerate(kinds)]
        raise UserError(f"no worker fits on any node: {'; '.join(reasons)}", field="workers")
    threads = [min((node.threads for node in part), default=1) for part in used]
    threads = [max(1, many // resources.processes) for resources, many in zip(kinds, threads, strict=True)]
    return Allocation(
        tuple(replace(resources, threads=many) for resources, many in zip(kinds, threads, strict=True)), tuple(counts)
    )


def lacking(shapes: Sequence[WorkerShape], allocation: Allocation, nodes: Sequence[NodeRoom]) -> list[str]:
    """For each kind of which no worker fits on any node now: a note with the reason."""
    return [
        f"{_field(index, listed=True)}: {_reason(resources, nodes)}; such workers start once a node joins that has room"
        for index, (resources, count) in enumerate(zip(allocation.kinds, allocation.counts, strict=True))
        if not count and len(shapes) > 1 and not any(_Free(node).fits(resources) for node in nodes)
    ]


def _reason(resources: WorkerResources, nodes: Sequence[NodeRoom]) -> str:
    """Why no worker of this kind fits, with the nodes' resources."""
    labels = "".join(f", {key}: {value}" for key, value in resources.labels)
    gpus = f"{resources.gpus:g} GPU{'s' * (resources.gpus > 1)} and " if resources.gpus else ""
    cpus = f"{resources.cpus:g} CPU{'s' * (resources.cpus > 1)}"
    return f"a worker needs {gpus}{cpus} on one node{labels}; the nodes have {_format_nodes(nodes)}"


class _Free:
    """What is left of a node."""

    def __init__(self, node: NodeRoom) -> None:
        self.node, self.cpus, self.gpus, self.workers = node, node.cpus, [1.0] * node.gpus, 0

    def fits(self, resources: WorkerResources) -> bool:
        return self.cpus >= resources.cpus - _EPSILON and len(self._devices(resources)) >= max(
            1, resources.gpus
        ) * bool(resources.gpus)

    def take(self, resources: WorkerResources) -> None:
        self.cpus -= resources.cpus
        self.workers += 1
        share = min(1.0, resources.gpus)
        for device in self._devices(resources)[: max(1, int(resources.gpus)) if resources.gpus else 0]:
            self.gpus[device] -= share

    def _devices(self, resources: WorkerResources) -> list[int]:
        """Devices with enough left, those in use first."""
        share = min(1.0, resources.gpus)
        return sorted((i for i, left in enumerate(self.gpus) if left >= share - _EPSILON), key=lambda i: self.gpus[i])

    @property
    def threads(self) -> int:
        """Torch threads of each worker, for equal shares."""
        return max(1, int(self.node.cpus) // max(1, self.workers))


def _take_room(resources: WorkerResources, free: Sequence[_Free], most: int) -> list[_Free]:
    """Take room for at most so many workers, node by node; returns the node of each."""
    nodes: list[_Free] = []
    for node in free:
        if node.node.has(resources.labels):
            while len(nodes) < most and node.fits(resources):
                node.take(resources)
                nodes.append(node)
    return nodes


def _resources(shape: WorkerShape, nodes: Sequence[NodeRoom]) -> WorkerResources:
    labels = tuple(sorted(shape.labels.items()))
    has_gpus = any(node.gpus for node in nodes if node.has(labels))
    gpus = shape.gpus_if(has_gpus)
    return WorkerResources(shape.cpus, gpus, 1, labels, shape.gpus_per_model)


def _field(index: int, *, listed: bool) -> str:
    return f"workers.{index}" if listed else "workers"


def _check_alone(resources: WorkerResources, nodes: Sequence[NodeRoom], field: str, *, raises: bool) -> None:
    """Raise UserError, by the key to change, if no node could run even one worker of this kind, empty as it may be."""
    if not raises or any(_Free(node).fits(resources) for node in nodes if node.has(resources.labels)):
        return
    chosen = [node for node in nodes if node.has(resources.labels)]
    key = "gpus" if chosen and max(node.gpus for node in chosen) < resources.gpus else "cpus"
    raise UserError(
        _reason(resources, nodes), field=f"{field}.{key if chosen else 'labels' if resources.labels else 'cpus'}"
    )


def _check_device(resources: WorkerResources, device: str, nodes: Sequence[NodeRoom]) -> None:
    gpus = resources.gpus
    if device.startswith("cuda") and not gpus:
        num_gpus = sum(node.gpus for node in nodes)
        raise UserError(f"{device!r}, but workers get no GPU (Ray has {num_gpus})", field="model.device")
    number = int(device.partition(":")[2] or 0)
    if number >= max(1, int(gpus / resources.processes)):
        seen = "its own, as cuda:0" if gpus <= resources.processes else f"its own {int(gpus)}, as cuda:0 and so on"
        raise UserError(
            f"{device!r} is not available: Ray chooses the GPUs, and a worker sees only {seen}; allowed: cuda "
            f"(to choose the GPU yourself, start with CUDA_VISIBLE_DEVICES={number})",
            field="model.device",
        )


def fitting_threads(resources: WorkerResources, num_parameters: int) -> WorkerResources:
    """The same, with at most as many torch threads as a model of this size can use."""
    return replace(resources, threads=min(resources.threads, -(-num_parameters // PARAMETERS_PER_THREAD) or 1))


# ---- what an autoscaler is asked for


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
            with suppress(Exception):  # the cluster may not answer now: the next call asks again, and the run continues
                self.request(bundles, selectors)
                self._asked = bundles, selectors


def bundles_of(allocation: Allocation) -> tuple[Bundles, Selectors]:
    """The resources of all workers of an allocation, whether they run already or not, and the labels of their nodes."""
    bundles: Bundles = []
    selectors: Selectors = []
    for resources, count in zip(allocation.kinds, allocation.counts, strict=True):
        bundle = {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}
        bundles += [bundle] * count
        selectors += [dict(resources.labels)] * count
    return bundles, selectors


def request_of_ray(bundles: Bundles, selectors: Selectors) -> None:
    """Ask the autoscaler of the Ray that we are connected to."""
    from ray.autoscaler.sdk import request_resources

    rest: dict[str, Any] = {"bundle_label_selectors": selectors} if any(selectors) else {}
    request_resources(bundles=bundles, **rest)


MOST_NODES = 1000
"""Nodes of one group, or workers of a kind with `count: auto`, that are asked for at most."""

_REPORTED = re.compile(r"node_[0-9a-f]{40,}")
"""The type of a node that no autoscaler started."""


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
    """Nodes of one worker each, in the order in which `allocate` serves the kinds."""
    rooms: list[NodeRoom] = []
    for shape in sorted(shapes, key=lambda shape: shape.count == "auto"):
        has_gpus = any(node.gpus for node in now if node.has(shape.labels.items()))
        room = NodeRoom(shape.cpus, math.ceil(shape.gpus_if(has_gpus)), None)
        rooms += [room] * (MOST_NODES if shape.count == "auto" else shape.count)
    return rooms


def _node_types() -> list[str]:
    """The types of the nodes that an autoscaler of either version of Ray's knows."""
    is_autoscaler_v2 = inside(IS_AUTOSCALER_V2)
    if is_autoscaler_v2 is None:
        return []
    return [name for name in (_types_of_v2() if is_autoscaler_v2() else _types_of_v1()) if name]


def _types_of_v1() -> list[str]:
    kv_get = inside(KV_GET)
    if kv_get is None:
        return []
    try:
        report = json.loads(kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
    except ValueError:
        return []
    return [*report.get("active_nodes", {}), *report.get("pending_launches", {})]


def _types_of_v2() -> list[str]:
    import ray

    get_cluster_status = inside(CLUSTER_STATUS)
    if get_cluster_status is None:
        return []
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return [node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]]
