"""Measures the memory a worker may use on its device, after loading its models; decoders/engine/memory.py allocates it.

A worker on a GPU may use the free memory there, limited to its share if Ray gave it a fraction. Workers on CPUs share the free
memory of the machine, or of their container, in proportion to their threads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from draftmill.decoders.base import CachedDecoder, Decoder

if TYPE_CHECKING:
    import torch

# The length for which the log records how many samples fit.
_LENGTH = 512
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a worker's batch: `max_rows` samples, `max_tokens` columns and `free_bytes` on `device`.

    `rows` is the number of samples of `length` tokens that fit.
    """

    device: str
    free_bytes: int
    max_rows: int
    max_tokens: int
    length: int
    rows: int


def fit(decoder: Decoder, *, threads: int, gpus: float = 1.0) -> BatchLimits | None:
    """Limit a decoder to the free memory of its device, or to a share if `gpus` is below 1; None if it has no cache."""
    if not isinstance(decoder, CachedDecoder):
        return None
    device = decoder.backbone.device
    free = free_bytes(device, threads=threads, gpu_share=gpus if 0 < gpus < 1 else 1.0)
    decoder.fit(free)
    length = min(_LENGTH, decoder.info.max_length or _LENGTH)
    return BatchLimits(str(device), free, decoder.max_rows, decoder.max_tokens, length, decoder.most_rows(length))


def free_bytes(device: torch.device, *, threads: int, gpu_share: float = 1.0) -> int:
    """Bytes of the device that this worker may still take."""
    if device.type != "cuda":
        return int(_host_bytes() * min(1.0, threads / _num_cores()))
    import torch

    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    # The allocator's cached memory counts as free.
    free += torch.cuda.memory_reserved(device) - used
    return max(0, min(free, int(gpu_share * total) - used))


def limit_gpu(gpus: float) -> None:
    """Limit this process to its fraction of the GPU that it sees; a whole GPU has no limit."""
    import torch

    if 0 < gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(gpus)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_bytes() -> int:
    """Free memory of the machine, or of the container if that has less: the machine's figure ignores a container's limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return available
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # Cached file pages count as used, but the kernel frees them on demand.
        return min(available, max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):
        return available
