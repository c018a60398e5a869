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
from draftmill.jobs.formatting import counted
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
        labels = [f"{key}={text}" for key, text in sorted((self.labels or {}).items()) if not key.startswith("ray.io/")]
        gpus = [counted(self.gpus, "GPU")] if self.gpus else []
        return f"({', '.join([f'{self.cpus:g} CPU' + 's' * (self.cpus != 1), *gpus, *labels])})"


def _selects(rule: str, value: str | None) -> bool:
    if rule.startswith("!"):
        return not _selects(rule[1:], value)
    if rule.startswith("in("):
        return value in [name.strip() for name in rule[3:-1].split(",")]
    return value == rule


# ---- workers


_EPSILON = 1e-6


def allocate(
    shapes: Sequence[WorkerShape], nodes: Sequence[NodeRoom], *, units: int, device: str = "auto"
) -> Allocation:
    """How many workers of each kind run on these nodes, at most one per unit, and the resources of each kind.

    A worker fits on a node if the node alone has its CPUs and GPUs; a fraction of a GPU never spans two of them. Kinds with a
    `count` are served first, then the others fill what is left, in their order. `gpus: auto` is one GPU each, or one for each
    process of a split model, if a node that the labels select has any. The CPUs of a node are divided among its workers as
    torch threads, and those of a worker among its processes. Raises UserError if no worker of any kind fits, with the reason
    and the nodes, or if `device` is a GPU and workers have none.
    """
    free = [_Free(node) for node in nodes]
    kinds = [_resources(shape, nodes) for shape in shapes]
    for resources in kinds:
        _check_device(resources, device, nodes)
    used: list[list[_Free]] = [[] for _ in shapes]
    for index in sorted(range(len(shapes)), key=lambda i: shapes[i].count == "auto"):
        count, taken = shapes[index].count, sum(map(len, used))
        most = max(min(units if count == "auto" else count, units - taken), 0 if taken else 1)
        for node in (node for node in free if node.node.has(kinds[index].labels)):
            while len(used[index]) < most and node.fits(kinds[index]):
                node.take(kinds[index])
                used[index].append(node)
    if not any(used):
        raise UserError("; ".join(_reason(resources, nodes) for resources in kinds), field="workers")
    threads = (min((node.threads for node in part), default=1) for part in used)
    return Allocation(
        tuple(replace(one, threads=max(1, many // one.processes)) for one, many in zip(kinds, threads, strict=True)),
        tuple(map(len, used)),
    )


def lacking(shapes: Sequence[WorkerShape], allocation: Allocation, nodes: Sequence[NodeRoom]) -> list[str]:
    """For each kind of which no worker fits on any node now: a note with the reason."""
    return [
        f"workers.{index}: {_reason(resources, nodes)}; such workers start once a node joins that has room"
        for index, (resources, count) in enumerate(zip(allocation.kinds, allocation.counts, strict=True))
        if not count and len(shapes) > 1 and not any(_Free(node).fits(resources) for node in nodes)
    ]


MOST_SHOWN = 6


def _reason(resources: WorkerResources, nodes: Sequence[NodeRoom]) -> str:
    """Why no worker of this kind fits, with the nodes, equal ones together: `2 x (4 CPUs, 1 GPU), (8 CPUs)`."""
    kinds = Counter(node.shown for node in nodes).most_common()
    there = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds[:MOST_SHOWN]) or "no nodes"
    more = f" and {len(kinds) - MOST_SHOWN} more kinds" if len(kinds) > MOST_SHOWN else ""
    labels = "".join(f", {key}: {value}" for key, value in resources.labels)
    gpus = f"{resources.gpus:g} GPU{'s' * (resources.gpus > 1)} and " if resources.gpus else ""
    cpus = f"{resources.cpus:g} CPU{'s' * (resources.cpus > 1)}"
    return f"a worker needs {gpus}{cpus} on one node{labels}; the nodes have {there}{more}"


class _Free:
    """What is left of a node."""

    def __init__(self, node: NodeRoom) -> None:
        self.node, self.cpus, self.gpus, self.workers = node, node.cpus, [1.0] * node.gpus, 0

    def fits(self, resources: WorkerResources) -> bool:
        return self.cpus >= resources.cpus - _EPSILON and len(self._devices(resources)) >= math.ceil(resources.gpus)

    def take(self, resources: WorkerResources) -> None:
        self.cpus -= resources.cpus
        self.workers += 1
        for device in self._devices(resources)[: math.ceil(resources.gpus)]:
            self.gpus[device] -= min(1.0, resources.gpus)

    def _devices(self, resources: WorkerResources) -> list[int]:
        """Devices with enough left, those in use first."""
        share = min(1.0, resources.gpus)
        return sorted((i for i, left in enumerate(self.gpus) if left >= share - _EPSILON), key=lambda i: self.gpus[i])

    @property
    def threads(self) -> int:
        """Torch threads of each worker, for equal shares."""
        return max(1, int(self.node.cpus) // max(1, self.workers))


def _resources(shape: WorkerShape, nodes: Sequence[NodeRoom]) -> WorkerResources:
    labels = tuple(sorted(shape.labels.items()))
    has_gpus = any(node.gpus for node in nodes if node.has(labels))
    gpus = shape.gpus_if(has_gpus)
    return WorkerResources(shape.cpus, gpus, 1, labels, shape.gpus_per_model)


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
    # Matrix products of a smaller model end before a second thread starts; on a busy machine they then wait for that thread.
    return replace(resources, threads=min(resources.threads, -(-num_parameters // 25_000_000) or 1))


# ---- what an autoscaler is asked for


Bundles = list[dict[str, float]]
Selectors = list[dict[str, str]]


@dataclass(slots=True)
class Demand:
    """Asks for room: for all workers, whether they run already or not.

    `allocate_for` gives the workers that so many units need on all nodes that the autoscaler may bring.
    """

    allocate_for: Callable[[int], Allocation]
    request: Callable[[Bundles, Selectors], None]
    _asked: tuple[Bundles, Selectors] = ([], [])

    def need(self, units: int) -> None:
        """So many units are left; none at the job's end."""
        bundles: Bundles = []
        selectors: Selectors = []
        allocation = self.allocate_for(units) if units else Allocation((), ())
        for resources, count in zip(allocation.kinds, allocation.counts, strict=True):
            bundle = {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}
            bundles += [bundle] * count
            selectors += [dict(resources.labels)] * count
        if (bundles, selectors) != self._asked:
            with suppress(Exception):  # the cluster may not answer now: the next call asks again, and the run continues
                self.request(bundles, selectors)
                self._asked = bundles, selectors


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
    rooms: list[NodeRoom] = []
    try:
        config = get_cluster_config()
        for group in [] if config is None else config.node_group_configs:
            room = NodeRoom(group.resources.get("CPU", 0), int(group.resources.get("GPU", 0)), None)
            rooms += [room] * (MOST_NODES if group.max_count < 0 else min(group.max_count, MOST_NODES))
        if rooms or not any(not _REPORTED.fullmatch(name) for name in _node_types()):
            return rooms or None
    except (AttributeError, TypeError, RuntimeError):  # another version of Ray
        return None
    for shape in sorted(shapes, key=lambda shape: shape.count == "auto"):  # as `allocate` serves the kinds
        room = NodeRoom(shape.cpus, math.ceil(_resources(shape, now).gpus), None)
        rooms += [room] * (MOST_NODES if shape.count == "auto" else shape.count)
    return rooms


def _node_types() -> list[str]:
    """The types of the nodes that an autoscaler of either version of Ray's knows."""
    import ray

    is_autoscaler_v2, get_cluster_status, kv_get = inside(IS_AUTOSCALER_V2), inside(CLUSTER_STATUS), inside(KV_GET)
    if is_autoscaler_v2 is None or get_cluster_status is None or kv_get is None:
        return []
    if is_autoscaler_v2():
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        types = [node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]]
    else:
        try:
            report = json.loads(kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
        except ValueError:
            return []
        types = [*report.get("active_nodes", {}), *report.get("pending_launches", {})]
    return [name for name in types if name]
