"""What one node of the cluster has, from the spec's `workers`: CPUs and GPUs of a node, and how many nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftmill.jobs.formatting import counted
from draftmill.jobs.manifests.job import Job
from draftmill.jobs.manifests.options import option_name
from draftmill.jobs.spec.worker_shape import WorkerShape
from draftmill.storage.errors import UserError


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of node and how many of it; `why` is a comment on where the numbers come from."""

    nodes: int
    most_nodes: int
    cpus: int
    gpus: int
    memory: str
    why: str


def shapes_of(job: Job) -> list[Shape]:
    """The nodes for each shape of the spec's workers."""
    shapes = job.spec.shapes
    if len(shapes) > 1:
        for field in ("nodes", "max_nodes", "cpus_per_node", "gpus_per_node"):
            if getattr(job.options, field) is not None:
                raise UserError(
                    "the spec's workers have several shapes; allowed: set count, cpus and gpus of each in the spec",
                    field=option_name(field),
                )
    return [_shape(job, workers) for workers in shapes]


def one_shape(job: Job) -> Shape:
    """The nodes of a job whose workers all have one shape; UserError for others."""
    shapes = shapes_of(job)
    if len(shapes) > 1:
        raise UserError(
            f"{len(shapes)} shapes, but {job.options.kind} has nodes of one kind here; allowed: one shape",
            field="workers",
        )
    return shapes[0]


def _shape(job: Job, workers: WorkerShape) -> Shape:
    """The nodes for one shape. Where no option says what a node has, it has what its share of the workers needs."""
    options = job.options
    worker_gpus = _gpus(job, workers)
    _check_room(job, workers, worker_gpus)
    nodes = 1 if options.kind == "slurm" and options.nodes is None else options.nodes
    room = _room(job, workers, worker_gpus)
    if room is None:
        room = 1 if nodes is None or workers.count == "auto" else math.ceil(workers.count / nodes)
    if nodes is None:
        nodes = 1 if workers.count == "auto" else math.ceil(workers.count / room)
    if workers.count != "auto" and max(nodes, options.max_nodes or 0) * room < workers.count:
        raise UserError(
            f"{nodes} is too few: workers.count is {workers.count}, and a node has room for {room}", field="--nodes"
        )
    cpus = options.cpus_per_node or max(1, math.ceil(room * workers.cpus))
    gpus = math.ceil(room * worker_gpus) if options.gpus_per_node is None else options.gpus_per_node
    return Shape(
        nodes, max(nodes, options.max_nodes or 0), cpus, gpus, options.memory, _why(workers, gpus, worker_gpus)
    )


def _check_room(job: Job, workers: WorkerShape, worker_gpus: float) -> None:
    """Refuse a node that has no room for one worker."""
    options = job.options
    for field, has, needs, key in (
        ("--gpus-per-node", options.gpus_per_node, worker_gpus, "workers.gpus"),
        ("--cpus-per-node", options.cpus_per_node, workers.cpus, "workers.cpus"),
    ):
        if has is not None and has < needs:
            raise UserError(f"{has} is too few: a worker needs {needs:g} ({key})", field=field)


def _gpus(job: Job, workers: WorkerShape) -> float:
    """The GPUs of a worker; `auto` is one a process if the model or the nodes are said to have one."""
    return workers.gpus_if(job.spec.model.device.startswith("cuda") or bool(job.options.gpus_per_node))


def _room(job: Job, workers: WorkerShape, worker_gpus: float) -> int | None:
    """How many workers fit on a node as the options describe it; None if they don't."""
    options = job.options
    rooms = []
    if options.gpus_per_node is not None and worker_gpus:
        rooms.append(math.floor(options.gpus_per_node / worker_gpus + 1e-9))
    if options.cpus_per_node is not None:
        rooms.append(math.floor(options.cpus_per_node / workers.cpus + 1e-9))
    return min(rooms, default=None)


def _why(workers: WorkerShape, gpus: int, worker_gpus: float) -> str:
    count = "as many workers as fit" if workers.count == "auto" else counted(workers.count, "worker")
    said = f"The spec asks for {count}, each with {workers.cpus:g} CPUs and {worker_gpus:g} GPUs."
    if workers.gpus == "auto" and gpus == 0:
        said += " workers.gpus is auto: --gpus-per-node N makes nodes with GPUs."
    return said
