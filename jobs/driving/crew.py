"""How many workers to run, and the resources of each, from the spec's `workers` section and Ray's resources. Pure."""

from __future__ import annotations

from dataclasses import replace

from actors.job import Seat
from jobs.spec.worker_shape import WorkerShape
from storage.errors import UserError

PARAMETERS_PER_THREAD = 25_000_000
"""Matrix products of a smaller model end before a second thread starts; on a busy machine they then wait for that thread."""


def crew(workers: WorkerShape, *, num_cpus: int, num_gpus: int, units: int, device: str = "auto") -> tuple[int, Seat]:
    """Number of workers, at most one per unit, and the seat of each.

    `gpus: auto` is one GPU each if the cluster has any. `count: auto` fills the GPUs, or else the CPUs: a small model
    decodes best with one thread per worker. The CPUs are divided among the workers as torch threads. Raises UserError if
    not even one worker fits, or if `device` is a GPU and workers have none.
    """
    gpus = (1.0 if num_gpus else 0.0) if workers.gpus == "auto" else workers.gpus
    if gpus > num_gpus:
        raise UserError(f"a worker needs {gpus:g} GPUs, Ray has {num_gpus}", field="workers.gpus")
    if workers.cpus > num_cpus:
        raise UserError(f"a worker needs {workers.cpus:g} CPUs, Ray has {num_cpus}", field="workers.cpus")
    if device.startswith("cuda") and not gpus:
        raise UserError(f"{device!r}, but workers get no GPU (Ray has {num_gpus})", field="model.device")
    number = int(device.partition(":")[2] or 0)
    if number >= max(1, int(gpus)):
        seen = "its own, as cuda:0" if gpus <= 1 else f"its own {int(gpus)}, as cuda:0 and so on"
        raise UserError(
            f"{device!r} is not available: Ray chooses the GPUs, and a worker sees only {seen}; allowed: cuda "
            f"(to choose the GPU yourself, start with CUDA_VISIBLE_DEVICES={number})",
            field="model.device",
        )
    fits = int(num_cpus // workers.cpus)
    if gpus:
        fits = min(fits, int(num_gpus // gpus))
    count = max(1, min(fits if workers.count == "auto" else workers.count, fits, units))
    return count, Seat(cpus=workers.cpus, gpus=gpus, threads=max(1, num_cpus // count))


def fitting_threads(seat: Seat, num_parameters: int) -> Seat:
    """The same seat, with at most as many torch threads as a model of this size can use."""
    return replace(seat, threads=min(seat.threads, -(-num_parameters // PARAMETERS_PER_THREAD) or 1))
