"""Loads a checkpoint folder as a backbone, and builds a running decoder from its settings.

Checkpoints are JSON and safetensors on disk: no remote code, nothing is downloaded, every tensor name is checked. checkpoint.py
reads what is known without the weights. A decoder's settings say what runs them (DecoderChoice.runs); its module is imported when
the decoder is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftmill.decoders.backbones import gpus
from draftmill.decoders.backbones.base import Backbone, Model, TokenBackbone
from draftmill.decoders.backbones.checkpoint import (
    bos_id,
    check_counts,
    check_names,
    each_tensor,
    header_shapes,
    inspect_model,
    read_config,
    stop_ids,
)
from draftmill.decoders.backbones.families.shares import Share, check_shares
from draftmill.decoders.backbones.families.table import Family, find_family
from draftmill.decoders.backbones.families.xlnet import xlnet_shape
from draftmill.decoders.backbones.head_files import head_place
from draftmill.decoders.backbones.heads import DraftHeads, load_heads
from draftmill.decoders.backbones.packed import can_pack, pack_products
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.base import CachedDecoder
from draftmill.decoders.common_settings import DecoderChoice, Estimate, Sampling
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.score_engine import ScoreEngine
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.settings import check_model


def build_decoder(setup: Setup, settings: DecoderChoice) -> CachedDecoder:
    """Return a decoder with free slots. Raises ValueError, with the field path, where settings and model do not fit."""
    check_model(settings, setup.info)
    settings.check_sampling(setup.sampling)
    return Engine(setup, algorithm_of(setup, settings))


def algorithm_of(setup: Setup, settings: DecoderChoice) -> Algorithm:
    """What the engine runs for these settings."""
    return cast("Callable[[Setup, DecoderChoice], Algorithm]", _named(settings.runs))(setup, settings)


def build_scorer(setup: Setup, settings: DecoderChoice, estimate: Estimate) -> CachedDecoder:
    """Return what scores texts, with free slots. Raises ValueError, with the field path, where settings and model do not fit."""
    check_model(settings, setup.info)
    algorithm = cast("Callable[[Setup, DecoderChoice, Estimate], Algorithm]", _named(settings.scorer))(
        setup, settings, estimate
    )
    # The model's own distribution scores; at temperature 0 its first choice is known beside it, and there is no noise.
    plain = replace(setup, sampling=Sampling(temperature=0.0), heads=None, drafter=None, trace=False)
    return ScoreEngine(plain, algorithm) if algorithm.estimates else Engine(plain, algorithm)


def _named(place: str) -> Any:
    """What is called `module:name`; imports the module."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def find_heads(settings: DecoderChoice, folder: Path, backbone: Model) -> DraftHeads | None:
    """Load the draft head that the settings name onto the device of the model that drafts, the one in `folder`. 'auto' is the
    head in that folder, if any. Raises ValueError if the named place has no head, none for this decoder, or one that does not
    fit the model."""
    place = head_place(settings, folder)
    heads = None if place is None else load_heads(*place)
    if heads is None:
        return None
    width = heads.sizes()["width"]
    if width != backbone.width:
        raise ValueError(f"decoder.head: made for models of width {width}, but this model has {backbone.width}")
    heads = heads.to(device=backbone.device, dtype=backbone.dtype)
    if backbone.min_rows == 1 and can_pack(backbone.dtype, backbone.device):
        # The model's products are packed, so its rows need no padding to keep their bits: the head's must not need any, either.
        pack_products(heads)
    return heads


__all__ = ["bos_id", "inspect_model", "load_backbone", "load_weights", "pick_device", "pick_dtype", "stop_ids"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_weights(folder: Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> dict[str, Tensor]:
    """Read every tensor of the checkpoint, one by one onto a device and into a dtype; ValueError where a file is damaged."""
    return each_tensor(folder, lambda file, name: file.get_tensor(name).to(device=device, dtype=dtype), "pt")


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch dtype of a setting; 'auto' is float32 on a CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise ValueError(f"model.dtype: {dtype!r}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def pick_device(device: str) -> str:
    """Return 'cpu' or 'cuda[:N]'; 'auto' takes a GPU where there is one. ValueError if torch can't use it: no silent CPU."""
    if device == "auto":
        if not torch.cuda.is_available() and gpus.has_gpu():
            raise ValueError(f"model.device: {gpus.unusable(device)}")
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not device.startswith("cuda"):
        raise ValueError(f"model.device: {device!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device: {gpus.unusable(device)}")
    number = int(device.partition(":")[2] or 0)
    if number and number >= torch.cuda.device_count():
        seen = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise ValueError(
            f"model.device: {device!r}, but this process sees other GPUs; allowed here: auto, cpu, cuda, {seen}"
        )
    return device


def load_backbone(
    folder: Path, *, family: str = "auto", dtype: str = "auto", device: str = "auto", share: Share | None = None
) -> Backbone | TokenBackbone:
    """Load a checkpoint onto a device and test it there; with `share`, this process's part of it (split.py). All processes of a
    split model load it at the same time. Raises ValueError as `inspect_model` does, and what `check_masking` raises."""
    config = read_config(folder)
    found = find_family(config, family)
    shapes = header_shapes(folder)
    check_counts(config, shapes, folder)
    found.check(config)
    where = pick_device(device)
    if where.startswith("cuda:"):
        torch.cuda.set_device(where)  # Triton starts kernels on the current device
    number = pick_dtype(dtype, where)
    check_names(found, config, shapes, folder)
    if not found.rows_are_tokens:
        weights = load_weights(folder, dtype=number, device=where)
        return XLNetBackbone(xlnet_shape(config), weights, dtype=number, device=where)
    if share is not None:
        return _load_split(found, config, folder, share, number, where)
    return _load_module(found, config, folder, number, where)


def _load_module(
    family: Family, config: Mapping[str, Any], folder: Path, dtype: torch.dtype, device: str
) -> TokenBackbone:
    from draftmill.decoders.backbones.ddit import DDiTBackbone
    from draftmill.decoders.backbones.llada2 import LLaDA2Backbone
    from draftmill.decoders.backbones.self_test import check_masking
    from draftmill.decoders.backbones.transformer import TransformerBackbone

    # Our own networks keep some of their weights in float32 whatever their dtype.
    weights = load_weights(folder, dtype=None if family.causal is None else dtype, device=device)
    full = family.full_names(weights)
    weights = {full[name]: tensor for name, tensor in weights.items()}
    backbone: DDiTBackbone | LLaDA2Backbone | TransformerBackbone
    if family.ddit is not None:
        backbone = DDiTBackbone(family.ddit(config), weights, dtype=dtype, device=device)
    elif family.llada2 is not None:
        backbone = LLaDA2Backbone(family.llada2(config), weights, dtype=dtype, device=device)
    else:
        assert family.causal is not None
        backbone = TransformerBackbone(family.causal, config, weights, dtype=dtype, device=device)
    check_masking(backbone)
    return backbone


def _load_split(
    family: Family, config: Mapping[str, Any], folder: Path, share: Share, dtype: torch.dtype, device: str
) -> TokenBackbone:
    from draftmill.decoders.backbones.self_test import check_masking
    from draftmill.decoders.backbones.split import SplitBackbone, share_of_weight

    check_shares(family.causal, family.name, config, share.count)
    assert family.causal is not None
    full = family.full_names(header_shapes(folder))

    def take(file: Any, name: str) -> Tensor:
        return share_of_weight(full[name], file.get_tensor(name), share).to(device=device, dtype=dtype)

    weights = {full[name]: tensor for name, tensor in each_tensor(folder, take, "pt").items()}
    backbone = SplitBackbone(family.causal, config, weights, share=share, dtype=dtype, device=device)
    check_masking(backbone)
    return backbone
