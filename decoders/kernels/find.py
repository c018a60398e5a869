"""Finds the kernels that can be used on a device: those that are wanted, installed, and equal to their references there.

They are used on a CUDA device, where Triton and a C compiler are installed, unless DRAFTMILL_KERNELS is 0; the compiler makes the
small library through which Triton starts kernels. Otherwise torch's own operations run, for which None stands; results of the two
differ by rounding alone.

Triton is imported when a kernel is tried (trial.py), and nowhere before.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.kernels import trial

VARIABLE: Final = "DRAFTMILL_KERNELS"
"""The environment variable: 0 turns the kernels off, 1 or nothing leaves them on."""
LEAST_CAPABILITY: Final = (8, 0)
"""Compute capability from which a program may have 99 KiB of shared memory, and tensor cores know bfloat16."""

Attend = Callable[..., Tensor]
"""Attention over a layer of the slot cache: that of attention.py, or trial.reference_attend, whose signature it has."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The product with the weights of experts: that of experts.py, or trial.reference_product."""
Sample = Callable[..., Tensor]
"""From logits to tokens and what decoders want to know of each row: sampling.py, or its reference, whose signature it has."""

_VERDICTS: Final[dict[str, str]] = {}


def find_attention(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int, relative: bool = False
) -> Attend | None:
    """The kernel for heads of this kind; `relative` if the model adds a score that depends on distances."""
    heads = {"num_heads": num_heads, "key_heads": key_heads, "width": width, "relative": relative}
    if not _is_used("attention", device, dtype, lambda: trial.attention_problem(device, dtype, **heads)):
        return None
    from draftmill.decoders.kernels.attention import attend

    return attend


def find_product(device: torch.device, dtype: torch.dtype) -> Product | None:
    """The product with the weights of experts."""
    if not _is_used("experts", device, dtype, lambda: trial.experts_problem(device, dtype)):
        return None
    from draftmill.decoders.kernels.experts import product

    return product


def find_sampling(device: torch.device, dtype: torch.dtype) -> Sample | None:
    """What draws the tokens of a model of this dtype, and tells of them."""
    if not _is_used("sampling", device, dtype, lambda: trial.sampling_problem(device)):
        return None
    from draftmill.decoders.kernels.sampling import sample

    return sample


def verdicts() -> dict[str, str]:
    """What was last found in this process for each kernel that was asked for: `on`, or `off: ` and why."""
    return dict(_VERDICTS)


def _is_used(name: str, device: torch.device, dtype: torch.dtype, problem: Callable[[], str | None]) -> bool:
    reason = "float64 is computed by torch" if dtype == torch.float64 else why_no_kernels(device) or problem()
    _VERDICTS[name] = "on" if reason is None else f"off: {reason}"
    return reason is None


def is_on(variable: str) -> bool:
    """What the environment says of a switch that is on without it. Raises ValueError for anything but 0 and 1."""
    given = os.environ.get(variable, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{variable}: {given!r} is not allowed; allowed: 0, 1")
    return given == "1"


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
