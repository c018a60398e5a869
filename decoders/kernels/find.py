"""Finds the kernels that can be used on a device: switched on, installed, and right on this device (trial.py).

They are used on a CUDA device, where Triton and a C compiler are installed, unless DRAFTMILL_KERNELS is 0; the compiler makes the
small library through which Triton starts kernels. Otherwise torch's own operations run, for which None stands; results of the two
differ by rounding alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from draftmill.decoders.kernels.trial import problem

VARIABLE: Final = "DRAFTMILL_KERNELS"
"""The environment variable: 0 turns the kernels off, 1 or nothing leaves them on."""
LEAST_CAPABILITY: Final = (7, 5)
"""Compute capability for which tiles are made (seen.py); before 8.0 there is no bfloat16, which the trial finds."""

Attend = Callable[..., Tensor]
"""Attention over a layer of the slot cache: that of attention.py."""
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The product with the weights of experts: that of experts.py."""
Sample = Callable[..., Tensor]
"""From logits to tokens and what decoders want to know of each row: sampling.py, or draws/sampling.py, which gives the same."""

_VERDICTS: Final[list[dict[str, str]]] = [{}]


@contextmanager
def noting() -> Iterator[dict[str, str]]:
    """Collects what is found for each kernel that is asked for inside: `on`, or `off: ` and why."""
    _VERDICTS.append({})
    try:
        yield _VERDICTS[-1]
    finally:
        _VERDICTS.pop()


def _module(name: str, module: str, device: torch.device, dtype: torch.dtype, **asked: Any) -> Any:
    """The module of a kernel that passes its trial with the arguments `asked`; None, with the reason noted, if it fails."""
    tried = torch.float32 if name == "sampling" else dtype  # logits are float32, whatever the model's dtype is
    reason = "float64 is computed by torch" if dtype == torch.float64 else why_no_kernels(device)
    reason = reason or problem(name, device, tried, **asked)
    _VERDICTS[-1][name] = "on" if reason is None else f"off: {reason}"
    return None if reason else importlib.import_module(f"draftmill.decoders.kernels.{module}")


def _demanded(name: str, kernel: Any) -> Any:
    """This kernel, for a model that must be exact; ValueError, with the reason, if it can't be used."""
    if kernel is None:
        raise ValueError(
            f"model.exact: true needs the kernel for {name} on a GPU, and here it is {_VERDICTS[-1].get(name)}; decode in "
            "bfloat16, float16 or float32 on an NVIDIA GPU with Triton, or in float32 on a CPU (model.device: cpu); or leave it "
            "out"
        )
    return kernel


def find_attention(device: torch.device, dtype: torch.dtype, *, fixed: bool = False, **heads: Any) -> Attend | None:
    """The kernel for `heads`: num_heads, key_heads and width; `relative` if scores depend on distances, not `plain` if they are
    capped, or heads have sinks. If `fixed`, a row has the same bits in any batch, provided that its tiles are fixed, too
    (Tiling.of); ValueError, with the reason, if there is none."""
    attention = _module("attention", "attention", device, dtype, **heads)
    if fixed:  # how many shares are worth it depends on how many tiles there are
        return partial(_demanded("attention", attention).attend, shares=1)
    return None if attention is None else attention.attend


def find_layers(device: torch.device, dtype: torch.dtype, *, num_heads: int, key_heads: int, width: int) -> Any:
    """The kernels between the products of a rotary model's layers: a module with `add_norm`, `rotate` and `gated`, or None."""
    return _module("layers", "layers", device, dtype, num_heads=num_heads, key_heads=key_heads, width=width)


def find_fixed_product(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The product of a linear layer of a model that must be exact; ValueError, with the reason, if there is none."""
    name = "fixed products"
    return _demanded(name, _module(name, "products", device, dtype)).fixed_product


def find_product(device: torch.device, dtype: torch.dtype, *, fixed: bool = False) -> Product | None:
    """The product with the weights of experts; if `fixed`, a row has the same bits in any batch."""
    experts = _module("experts", "experts", device, dtype, fixed=fixed)
    return None if experts is None else experts.fixed_product if fixed else experts.product


def find_sampling(device: torch.device, dtype: torch.dtype) -> Sample | None:
    """The kernel that draws the tokens of a model of this dtype, and makes their notes."""
    sampling = _module("sampling", "sampling", device, dtype)
    return None if sampling is None else sampling.sample


def is_on(variable: str) -> bool:
    """Whether an environment variable is 1 or not set; ValueError for anything but 0 and 1."""
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
        return f"this GPU has compute capability {have}; the kernels are for {need} (Turing) or later"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang, or CC), with which Triton makes the library that starts kernels"
    return None
