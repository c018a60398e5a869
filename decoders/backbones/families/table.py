"""The table of model families: which one a config.json is of, and what is known of a model from its config alone.

Facts were read from the checkpoints' own code and configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

from draftmill.decoders.backbones.families import any_causal, blocks, masked
from draftmill.decoders.backbones.families.causal import Like
from draftmill.decoders.backbones.families.config import Config, fitting, whole
from draftmill.decoders.backbones.families.family import Family, rotary_family
from draftmill.decoders.backbones.families.xlnet import xlnet_shape
from draftmill.decoders.base import ModelInfo

# More than any published model has; memory is allocated by this number.
_MOST_POSITIONS: Final = 1 << 24
_CAUSAL: Final[tuple[Like, ...]] = ("llama", "mistral", "qwen2", "qwen3")
_FAMILIES: Final = (
    Family("xlnet", "any_subset", xlnet_shape, mask=6),
    *(rotary_family(name, "causal", name, shift=1) for name in _CAUSAL),
    *masked.FAMILIES,
    *blocks.FAMILIES,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
# Masked models that were trained by discrete diffusion forcing (D2F; Wang et al., 2025, and its public code): the same networks,
# which see blocks of a text one after the other, of 16 tokens in training. No config says so: the user does.
_D2F: Final[Any] = {"kind": "blocks", "prompt_block": True, "block": 16}
FAMILIES |= {f"d2f_{name}": replace(FAMILIES[name], name=f"d2f_{name}", **_D2F) for name in ("llada", "dream")}

# The `model_type` in config.json of families that have another name here.
_MODEL_TYPES = {"Dream": "dream", "Fast_dLLM_Qwen": "fast_dllm_v2", "llada2_moe": "llada2", "lladamoe": "llada_moe"}


def masked_diffusion_families() -> tuple[str, ...]:
    """The families of masked-diffusion models; every row carries a token, unlike in two-stream models."""
    return tuple(sorted(name for name, family in FAMILIES.items() if family.kind in {"masked", "ancestral"}))


def find_family(config: Config, requested: str) -> Family:
    """The family named by the user, or with 'auto' that of config.json; ValueError if it is unknown."""
    name = _recognise(config) if requested == "auto" else requested
    if name in FAMILIES:
        return FAMILIES[name]
    if (outside := any_causal.family(name)) is not None:
        return outside
    source = "config.json has model_type" if requested == "auto" else "given as"
    raise ValueError(
        f"model.family: {source} {name!r}; known families: {', '.join(sorted(FAMILIES))}, and the causal models of transformers "
        f"{any_causal.version()}"
    )


def _recognise(config: Config) -> str:
    """The family of a config: some have no `model_type` (SEDD, training runs of MDLM), or another family's (LLaDA-MoE)."""
    name = str(config.get("model_type"))
    if "model_type" not in config and "graph" in config:
        return "sedd"
    if "model_type" not in config and "parameterization" in config:
        return "mdlm"
    if name == "llada" and "num_experts" in config:
        return "llada_moe"
    return _MODEL_TYPES.get(name, name)


def turn_ends(config: Config) -> tuple[str, ...]:
    """Return the special tokens that end a turn of a chat in the family of config.json, if the family has any."""
    family = FAMILIES.get(_recognise(config))
    return () if family is None else family.ends


def describe(family: Family, config: Config, *, mask_id: int | None) -> ModelInfo:
    """Describe a checkpoint from its config alone; raises ValueError if config.json does not fit."""
    shape = family.shape(config)
    mask = _mask_id(family, config, mask_id, shape.vocab_size)
    return ModelInfo(
        family=family.name,
        vocab_size=shape.vocab_size,
        mask_id=mask,
        max_length=_max_length(family, config, shape),
        kind=family.kind,
        num_parameters=sum(prod(size) for size in shape.tensors().values()),
        suppressed=() if mask is None else (mask,),
        shift=family.shift,
        left_shift=family.left_shift,
        prompt_block=family.prompt_block,
        block_size=family.block_size(config),
    )


def _mask_id(family: Family, config: Config, mask_id: int | None, vocab_size: int) -> int | None:
    own = family.mask_id(config)
    if mask_id is not None and own is None and family.kind != "causal":
        raise ValueError(f"model.mask_id: {mask_id} given, but models of family {family.name!r} have no mask token")
    if family.mask_is_last and mask_id not in {None, own}:
        raise ValueError(
            f"model.mask_id: {mask_id} given, but in models of family {family.name!r} it is the last id, {own}"
        )
    mask = own if mask_id is None else mask_id
    if mask is not None and not 0 <= mask < vocab_size:
        origin = "" if mask_id is not None else " (by config.json, or the family's default)"
        raise ValueError(f"model.mask_id: {mask} is outside the vocabulary; allowed: 0 .. {vocab_size - 1}{origin}")
    return mask


def _max_length(family: Family, config: Config, shape: Any) -> int | None:
    """The length under `draftmill` in config.json, else the public one there."""
    ours, public = config.get("draftmill") or {}, shape.max_length
    if not isinstance(ours, Mapping):
        raise ValueError(f"model.path: config.json has draftmill = {ours!r}; allowed: an object")
    with fitting(family.name):
        own = None if ours.get("max_length") is None else whole(ours, "max_length")
    if isinstance(public, int) and public > _MOST_POSITIONS:
        raise ValueError(f"model.path: config.json has texts of {public:,} tokens; allowed: up to {_MOST_POSITIONS:,}")
    if own is not None and public is not None and own > public and shape.is_bounded:
        raise ValueError(
            f"model.path: config.json has draftmill.max_length = {own}; the model's positions end at {public}"
        )
    return public if own is None else own
