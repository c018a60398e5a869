"""Whether the kernels are used: on a CUDA device, where Triton and a C compiler are installed, unless DRAFTMILL_KERNELS is 0.

Otherwise torch's own operations run. Results of the two differ by rounding alone. The compiler makes the small library through
which Triton starts kernels.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Final

import torch

VARIABLE: Final = "DRAFTMILL_KERNELS"
"""The environment variable: 0 turns the kernels off, 1 or nothing leaves them on."""
LEAST_CAPABILITY: Final = (8, 0)
"""Compute capability from which a program may have 99 KiB of shared memory, and tensor cores know bfloat16."""


def is_on(variable: str) -> bool:
    """What the environment says of a switch that is on without it. Raises ValueError for anything but 0 and 1."""
    given = os.environ.get(variable, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{variable}: {given!r} is not allowed; allowed: 0, 1")
    return given == "1"


def use_kernels(device: torch.device) -> bool:
    """Whether tensors on this device go through the kernels; asked once when a model is loaded."""
    return why_no_kernels(device) is None


def why_no_kernels(device: torch.device) -> str | None:
    """Why kernels are not used on this device, in a few words; None if they are."""
    if not is_on(VARIABLE):
        return f"{VARIABLE} is 0"
    if device.type != "cuda" or torch.version.cuda is None:
        return "they are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {have}; the kernels' tiles need the shared memory of {need} (Ampere) or later"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang, or CC), with which Triton makes the library that starts kernels"
    return None
