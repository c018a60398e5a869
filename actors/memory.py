"""How much memory a worker may use on its device, measured when its models are loaded; decoders/engine/memory.py shares it out.

A worker on a GPU has what is free there, within its share where Ray gave it a fraction. Workers on CPUs divide what the machine,
or the container that they run in, has left by their threads, as they divide the cores.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from decoders.base import Decoder

if TYPE_CHECKING:
    import torch

# The length for which the record says how many samples fit.
_LENGTH = 512
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker's batch may take: at most `max_rows` samples and `max_tokens` columns, within `free_bytes` of `device`.

    `rows` is how many samples of `length` tokens that makes.
    """

    device: str
    free_bytes: int
    max_rows: int
    max_tokens: int
    length: int
    rows: int

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def fit(decoder: Decoder, *, threads: int, gpus: float = 1.0) -> Room | None:
    """Let a decoder hold no more than its device has room for, of which `gpus` below 1 is a share; None where it has no cache."""
    from decoders.engine.slots import SlotDecoder

    if not isinstance(decoder, SlotDecoder):
        return None
    device = decoder.backbone.device
    free = free_bytes(device, threads=threads, gpu_share=gpus if 0 < gpus < 1 else 1.0)
    decoder.fit(free)
    length = min(_LENGTH, decoder.info.max_length or _LENGTH)
    return Room(str(device), free, decoder.max_rows, decoder.max_tokens, length, decoder.most_rows(length))


def free_bytes(device: torch.device, *, threads: int, gpu_share: float = 1.0) -> int:
    """Bytes of the device that this worker may still take."""
    if device.type != "cuda":
        return int(_host_bytes() * min(1.0, threads / _num_cores()))
    import torch

    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    # What the allocator keeps for later is as good as free.
    free += torch.cuda.memory_reserved(device) - used
    return max(0, min(free, int(gpu_share * total) - used))


def limit_gpu(gpus: float) -> None:
    """Keep this process within its fraction of the GPU that it sees; a whole one has no limit."""
    import torch

    if 0 < gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(gpus)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_bytes() -> int:
    """What the machine has left, or the container, whose limit the machine's figure does not know."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return available
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # Pages of files are counted as used, and given back when they are wanted.
        return min(available, max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):
        return available
