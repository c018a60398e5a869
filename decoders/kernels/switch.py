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


def is_on(variable: str) -> bool:
    """What the environment says of a switch that is on without it. Raises ValueError for anything but 0 and 1."""
    given = os.environ.get(variable, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{variable}: {given!r} is not allowed; allowed: 0, 1")
    return given == "1"


def use_kernels(device: torch.device) -> bool:
    """Whether tensors on this device go through the kernels; asked once when a model is loaded."""
    wanted = is_on(VARIABLE)
    return wanted and device.type == "cuda" and torch.version.cuda is not None and _has_triton()


def _has_triton() -> bool:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and compiler is not None
