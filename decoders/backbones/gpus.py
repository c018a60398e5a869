"""Finds this machine's NVIDIA GPUs without CUDA, and says why torch can't use one."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

_VERSION: Final = Path("/proc/driver/nvidia/version")
_DEVICES: Final = Path("/dev")
INDEX: Final = "https://download.pytorch.org/whl"
# The least driver of each CUDA whose build of torch is offered: CUDA Compatibility, "minor version compatibility".
_BUILDS: Final = ((580, "cu130"), (525, "cu126"))


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as 580.65.06; None if there is none."""
    try:
        match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", _VERSION.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return None if match is None else match[1]


def has_gpu() -> bool:
    """Whether this process may use an NVIDIA GPU, whatever torch thinks: one is not hidden, and its device can be opened."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in {"", "-1", "NoDevFiles"} or driver_version() is None:
        return False
    for path in _DEVICES.glob("nvidia[0-9]*"):
        with suppress(OSError):  # a container or a batch system may list one that its processes may not use
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            return True
    return False


def unusable(device: str) -> str:
    """Why torch can't use this machine's GPU for `model.device`, and what to do."""
    driver, cuda = driver_version(), torch.version.cuda
    built = f"for CUDA {cuda}" if cuda else "without CUDA"
    version = "no NVIDIA driver was found" if driver is None else f"its NVIDIA driver is {driver}"
    build = next((name for least, name in _BUILDS if driver and int(driver.partition(".")[0]) >= least), None)
    if driver is None:
        advice = "install the driver, or give the container its GPU"
    elif build is None:
        advice = f"install driver {_BUILDS[-1][0]} or later"
    elif cuda and build == f"cu{cuda.replace('.', '')}":
        advice = (
            "the two fit, so run `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'` there to see the reason"
        )
    else:
        advice = f"install the build of torch that fits the driver: pip install torch --index-url {INDEX}/{build}"
    return (
        f"{device!r}, but torch {torch.__version__}, built {built}, can't use a GPU of this machine; {version}. Here "
        f"{advice}; or set model.device: cpu (with Ray also workers.gpus: 0) to decode on the CPU"
    )
