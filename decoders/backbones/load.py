"""From a checkpoint folder to a backbone: config.json and safetensors only, no remote code, every name accounted for.

Knows the file layout of Hugging Face checkpoints (one model.safetensors, or shards with an index). Fetching a model from
elsewhere is not its business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decoders.backbones.base import Backbone
from decoders.backbones.families import Family, describe, find_family
from decoders.backbones.xlnet import XLNetBackbone
from decoders.base import ModelInfo

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as a dict; ValueError where it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"model.path: {folder} has no config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model.path: {path} is not a JSON object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, sorted; ValueError where there are none or the index names a missing one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ValueError(f"model.path: {folder} lacks {', '.join(missing)}; only safetensors checkpoints are read")
    return files


def inspect_model(
    folder: Path, *, family: str = "auto", mask_id: int | None = None, max_length: int | None = None
) -> ModelInfo:
    """Describe a checkpoint from config.json and the headers of its weight files, without reading the weights.

    Raises ValueError, with the field path, where the family is unknown, the config does not fit it, a file is damaged, or a
    tensor is missing, unexpected, or of another shape.
    """
    config = read_config(folder)
    found = find_family(config, family)
    info = describe(found, config, mask_id=mask_id, max_length=max_length)
    _check_names(found, config, _header_shapes(folder), folder)
    return info


def _header_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {path} is damaged or no safetensors file: {error}") from error
    return shapes


def _check_names(
    family: Family, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    expected, optional = family.weight_shapes(config), family.optional(config)
    missing = sorted(expected.keys() - shapes.keys())
    surplus = sorted(shapes.keys() - expected.keys() - optional)
    wrong = sorted(name for name in expected.keys() & shapes.keys() if shapes[name] != expected[name])
    for names, what in ((missing, "lacks the tensors"), (surplus, "has tensors unknown to the family:")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"model.path: {folder} (family {family.name!r}) {what} {', '.join(names[:5])}{more}")
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"model.path: {folder}: {name} has shape {shapes[name]}, but config.json says {expected[name]}"
        )


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of the checkpoint; ValueError where a file is damaged."""
    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {path} is damaged or no safetensors file: {error}") from error
    return weights


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch dtype of a setting; 'auto' is float32 on a CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ValueError(f"model.dtype: {dtype!r}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def pick_device(device: str) -> str:
    """Return 'cpu' or 'cuda[:N]'; 'auto' takes a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not device.startswith("cuda"):
        raise ValueError(f"model.device: {device!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device: {device!r}, but this machine has no usable GPU; allowed here: auto, cpu")
    return device


def load_backbone(folder: Path, *, family: str = "auto", dtype: str = "auto", device: str = "auto") -> Backbone:
    """Load a checkpoint onto a device; raises ValueError as `inspect_model` does."""
    config = read_config(folder)
    found = find_family(config, family)
    found.check(config)
    where = pick_device(device)
    weights = load_weights(folder)
    _check_names(found, config, {name: tuple(tensor.shape) for name, tensor in weights.items()}, folder)
    assert found.name == "xlnet", f"family {found.name} has a table entry but no backbone"
    return XLNetBackbone(config, weights, dtype=pick_dtype(dtype, where), device=where)
