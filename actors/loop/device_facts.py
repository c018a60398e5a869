"""What a decoder computes with: its device, versions, dtype, and which kernels and graphs are used, or why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones.gpus import driver_version
from draftmill.decoders.backbones.packed import PackedLinear, can_pack
from draftmill.decoders.backbones.small_weights import SmallEmbedding, SmallLinear, adds_exactly
from draftmill.decoders.base import Decoder
from draftmill.decoders.engine.engine import Engine

_ROWS: Final = 16
_LOOKS: Final = 3


def device_facts(decoder: Decoder) -> dict[str, Any]:
    """The facts of a loaded decoder, as JSON data: `name`, `dtype` and `torch`, `weights` if they are small, `drafts` that are
    chosen by time; on a GPU also the rest."""
    if not isinstance(decoder, Engine):  # a decoder of the user's own
        return {}
    device = decoder.backbone.device
    facts: dict[str, Any] = {"dtype": str(decoder.backbone.dtype).removeprefix("torch."), "torch": torch.__version__}
    facts |= small_weights(decoder.backbone, decoder.info.num_parameters) | _layers(decoder.backbone)
    if decoder.algorithm.auto is not None:
        facts["drafts"] = decoder.algorithm.auto.shown
    if len(decoder.models) > 1:
        facts["drafter"] = _layers(decoder.models[1].backbone)
    if device.type != "cuda":
        kind = torch.backends.cpu.get_cpu_capability()  # sums are rounded otherwise on another one
        price = {} if "weights" in facts else _price_of_half(decoder)  # integers multiply in any dtype
        return {"name": "CPU", **facts, "capability": kind, **price}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        **facts,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "kernels": decoder.sampler.found | facts.pop("kernels", {}),
        "graphs": decoder.graphs,
    }


def _layers(backbone: Any) -> dict[str, Any]:
    """What runs a model's layers; on a GPU also what was found for its kernels."""
    names = ("layers_by", "kernels")[: 1 if backbone.device.type == "cpu" else 2]
    return {name: value for name in names if (value := getattr(backbone, name, None))}


def small_weights(backbone: Any, num_parameters: int) -> dict[str, Any]:
    """The kind of a model's small weights, if it has any, and the bytes that all its weights take, `weight_bytes`."""
    model: Any = getattr(backbone, "model", None)
    layers = [part for part in model.modules() if isinstance(part, SmallLinear)] if isinstance(model, nn.Module) else []
    if not layers:
        return {}
    others = num_parameters - sum(layer.in_features * layer.out_features for layer in layers)
    parts = (part for part in model.modules() if isinstance(part, SmallLinear | SmallEmbedding))
    held = {id(tensor): tensor.numel() * tensor.itemsize for part in parts for tensor in part.buffers()}
    small = sum(held.values())
    kind = "w8a8" if layers[0].one_code else layers[0].kind
    if layers[0].kind == "int8" and backbone.device.type == "cpu" and not adds_exactly():
        kind += " by slower float32 products (no VNNI)"
    return {"weights": kind, "weight_bytes": small + others * backbone.dtype.itemsize}


def _price_of_half(decoder: Engine) -> dict[str, float]:
    """How often a product in half precision takes as long as one in float32 on this CPU: `times_float32` of a model in half
    precision, where it is above 1, and `bfloat16_times` of one in float32, where it is below."""
    own, width = decoder.backbone.dtype, decoder.backbone.width
    dtype = torch.bfloat16 if own == torch.float32 else own
    packs = can_pack(dtype, decoder.backbone.device)
    if own == torch.float64 or (own == torch.float32 and not packs):
        return {}
    wide = nn.Linear(width, 4 * width, bias=False)
    half = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
    half_s = _seconds(PackedLinear(half.weight, None) if packs else half, torch.ones(_ROWS, width, dtype=dtype))
    times = half_s / _seconds(PackedLinear(wide.weight, None), torch.ones(_ROWS, width))
    if own == torch.float32:
        return {"bfloat16_times": round(times, 1)} if times < 1 else {}
    return {"times_float32": round(times, 1)} if times > 1 else {}


@torch.no_grad()
def _seconds(product: nn.Module, rows: Tensor) -> float:
    """The least of a few looks, after one that may write a kernel: other work on the machine only adds."""
    times_s = []
    for _ in range(1 + _LOOKS):
        began_s = time.perf_counter()
        product(rows)
        times_s.append(time.perf_counter() - began_s)
    return min(times_s[1:])
