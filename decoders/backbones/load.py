"""Loads a checkpoint folder as a backbone: JSON and safetensors only, no remote code, every tensor name checked.

checkpoint.py reads what is known without the weights. Models must be on disk; nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.decoders.backbones import gpus
from draftmill.decoders.backbones.any_causal import AnyCausalBackbone
from draftmill.decoders.backbones.base import Model, Running
from draftmill.decoders.backbones.checkpoint import check_weights, each_tensor, inspect_model, read_config
from draftmill.decoders.backbones.ddit import DDiTBackbone
from draftmill.decoders.backbones.families.any_causal import CausalFacts
from draftmill.decoders.backbones.families.masked import DDiTShape
from draftmill.decoders.backbones.families.rotary import RotaryShape
from draftmill.decoders.backbones.families.shares import Share, check_shares, share_of_shape
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.backbones.families.xlnet import XLNetShape
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.quantized import Form, find_form
from draftmill.decoders.backbones.self_test import check_masking
from draftmill.decoders.backbones.split import SplitBackbone, share_of_weight
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.kernels.find import noting

__all__ = ["inspect_model", "load_backbone", "load_weights", "pick_device", "pick_dtype"]
_BACKBONES: dict[type, Any] = {XLNetShape: XLNetBackbone, DDiTShape: DDiTBackbone, RotaryShape: RotaryBackbone}


def load_weights(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    form: Form | None = None,
    share: Share | None = None,
) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, or the `share` of it, onto a device and into a dtype; what is quantized in `form` is
    unpacked."""

    def ready(name: str, tensor: Tensor) -> Tensor:
        part = tensor if share is None else share_of_weight(name, tensor, share)
        return part.to(device=device, dtype=dtype)

    if form is None:
        return each_tensor(folder, lambda file, name: ready(name, file.get_tensor(name)), "pt")
    stored = each_tensor(folder, lambda file, name: file.get_tensor(name), "pt")
    return {name: ready(name, tensor) for name, tensor in form.unpacked(stored)}


def check_finite(weights: Mapping[str, Tensor], path: Path, field: str) -> None:
    """ValueError if a draft head has a weight that is nan or inf: texts would be right, and no draft would hold."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(f"{field}: {path}: {name} has weights that are nan or inf")


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch dtype of a setting; 'auto' is float32 on a CPU and bfloat16 on a GPU."""
    return getattr(torch, ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype)


def pick_device(device: str) -> str:
    """Return 'cpu' or 'cuda[:N]'; 'auto' takes a GPU where there is one. ValueError if torch can't use it: no silent CPU."""
    is_found = torch.cuda.is_available()
    if not is_found and (device.startswith("cuda") or (device == "auto" and gpus.has_gpu())):
        raise ValueError(f"model.device: {gpus.unusable(device)}")
    if device == "auto":
        return "cuda" if is_found else "cpu"
    number = int(device.partition(":")[2] or 0)
    if number and number >= torch.cuda.device_count():
        seen = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise ValueError(
            f"model.device: {device!r}, but this process sees other GPUs; allowed here: auto, cpu, cuda, {seen}"
        )
    return device


def load_backbone(
    folder: Path,
    *,
    family: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    share: Share | None = None,
    exact: bool = False,
    small: str = "auto",
) -> Model:
    """Load a checkpoint onto a device and test it there; with `share`, this process's part of it (split.py). All processes of a
    split model load it at the same time. With `exact` a row has the same bits in any batch, or the model is refused. `small` is
    `model.weights` (small_weights.py). Raises ValueError as `inspect_model` does, and what `check_masking` raises."""
    config = read_config(folder)
    entry = find_family(config, family)
    check_weights(entry, config, folder)
    shape, place = entry.shape(config), pick_device(device)
    if place.startswith("cuda:"):
        torch.cuda.set_device(place)  # Triton starts kernels on the current device
    torch_dtype = pick_dtype(dtype, place)
    problems = {
        f"family {entry.name!r} has no small form": not isinstance(shape, RotaryShape | CausalFacts),
        "model.exact has other products on a GPU": exact and place != "cpu",
    }
    if small != "auto" and any(problems.values()):
        raise ValueError(f"model.weights: {small}, but {next(filter(problems.get, problems))}; allowed: auto")
    if small == "w8a8" and not getattr(shape, "can_turn", False):
        reason = "is for networks of our own without mixtures, whose states and heads have multiples of 16 numbers"
        raise ValueError(f"model.weights: 'w8a8' {reason}; allowed for family {entry.name!r}: auto, int8, int4, fp8")
    if share is not None:
        check_shares(entry.name, shape, share.count)
        shape = share_of_shape(shape, share)
    # transformers puts the weights of its models together on the CPU; small ones are made there, too.
    first = "cpu" if isinstance(shape, CausalFacts) or small != "auto" else place
    # Some networks keep some of their weights in float32 whatever their dtype.
    is_plain = isinstance(shape, XLNetShape) or (isinstance(shape, RotaryShape) and not shape.has_groups)
    read_as = torch_dtype if is_plain else None
    with noting() as kernels:
        weights = load_weights(folder, dtype=read_as, device=first, form=find_form(config), share=share)
        weights = entry.own_names(config, weights)
        how = Running(torch_dtype, torch.device(place), exact, small)
        backbone: Any
        if share is not None:
            backbone = SplitBackbone(shape, weights, how, share=share)
        elif isinstance(shape, CausalFacts):
            backbone = AnyCausalBackbone(entry.name, config, weights, how)
        else:
            backbone = _BACKBONES[type(shape)](shape, weights, how)
        if entry.rows_are_tokens:
            check_masking(backbone)
        backbone.kernels = kernels
    if exact and not backbone.exact:
        raise ValueError(
            f"model.exact: true, but in {str(torch_dtype).removeprefix('torch.')} on this CPU the batch changes last bits; "
            "allowed: model.exact: false, or, from another dtype, model.dtype: float32"
        )
    return backbone
