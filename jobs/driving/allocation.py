"""How many workers to run, and the resources of each, from the spec's `workers` section and the cluster's nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.jobs.driving.nodes import NodeRoom, shown
from draftmill.jobs.spec.worker_shape import WorkerShape
from draftmill.storage.errors import UserError

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
        used[index] = _placed(kinds[index], free, max(most, 0 if sum(counts) else 1))
        counts[index] = len(used[index])
    if not sum(counts):
        reasons = [f"{_field(i, listed=True)}: {reason(resources, nodes)}" for i, resources in enumerate(kinds)]
        raise UserError(f"no worker fits on any node: {'; '.join(reasons)}", field="workers")
    threads = [min((node.threads for node in part), default=1) for part in used]
    threads = [max(1, many // resources.processes) for resources, many in zip(kinds, threads, strict=True)]
    return Allocation(
        tuple(replace(resources, threads=many) for resources, many in zip(kinds, threads, strict=True)), tuple(counts)
    )


def lacking(shapes: Sequence[WorkerShape], found: Allocation, nodes: Sequence[NodeRoom]) -> list[str]:
    """For each kind of which no worker fits on any node now: a note that says why."""
    return [
        f"{_field(index, listed=True)}: {reason(resources, nodes)}; such workers start once a node joins that has room"
        for index, (resources, count) in enumerate(zip(found.kinds, found.counts, strict=True))
        if not count and len(shapes) > 1 and not any(_Free(node).fits(resources) for node in nodes)
    ]


def reason(resources: WorkerResources, nodes: Sequence[NodeRoom]) -> str:
    """Why no worker of this kind fits, with the nodes' resources."""
    labels = "".join(f", {key}: {value}" for key, value in resources.labels)
    gpus = f"{resources.gpus:g} GPU{'s' * (resources.gpus > 1)} and " if resources.gpus else ""
    cpus = f"{resources.cpus:g} CPU{'s' * (resources.cpus > 1)}"
    return f"a worker needs {gpus}{cpus} on one node{labels}; the nodes have {shown(nodes)}"


@dataclass(slots=True)
class _Free:
    """What is left of a node."""

    node: NodeRoom
    cpus: float
    gpus: list[float]
    workers: int = 0

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


def _placed(resources: WorkerResources, free: Sequence[_Free], most: int) -> list[_Free]:
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
    return WorkerResources(shape.cpus, gpus, 1, labels, shape.max_rows, shape.max_tokens, shape.gpus_per_model)


def _field(index: int, *, listed: bool) -> str:
    return f"workers.{index}" if listed else "workers"


def _check_alone(resources: WorkerResources, nodes: Sequence[NodeRoom], field: str, *, raises: bool) -> None:
    """Raise UserError, by the key to change, if no node could run even one worker of this kind, empty as it may be."""
    if not raises or any(_Free(node).fits(resources) for node in nodes if node.has(resources.labels)):
        return
    chosen = [node for node in nodes if node.has(resources.labels)]
    key = "gpus" if chosen and max(node.gpus for node in chosen) < resources.gpus else "cpus"
    raise UserError(
        reason(resources, nodes), field=f"{field}.{key if chosen else 'labels' if resources.labels else 'cpus'}"
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
