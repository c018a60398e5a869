"""The table of model families: how to read the config, tensor names, mask id and kind of each.

Pure tables and checks over a config dict; reads no weights and imports no torch. Facts were read from the checkpoints'
own code and configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final, TypeVar

from draftmill.decoders.backbones.families import any_causal
from draftmill.decoders.backbones.families.blocks import (
    FULL_ATTENTION,
    llada2_name,
    llada2_shape,
    nemotron_name,
    nemotron_shape,
)
from draftmill.decoders.backbones.families.causal import Like, rotary_shape
from draftmill.decoders.backbones.families.config_fields import fitting, token_id, whole
from draftmill.decoders.backbones.families.masked import (
    LLADA_BUILT,
    LLADA_MOE_BUILT,
    LLADA_PREFIX,
    dream_shape,
    llada_as_llama,
    llada_moe_as_qwen3,
    llada_name,
    mdlm_shape,
    sedd_shape,
)
from draftmill.decoders.backbones.families.rotary import Shapes
from draftmill.decoders.backbones.families.xlnet import xlnet_shape
from draftmill.decoders.base import ModelInfo, ModelKind

# More than any published model has; memory is allocated by this number.
_MOST_POSITIONS: Final = 1 << 24
MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""

Config = Mapping[str, Any]
T = TypeVar("T")


def _is_frequency(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    `shape` reads config.json: a RotaryShape, DDiTShape, XLNetShape or CausalFacts, whose network runs the model. Each has
    `vocab_size`, `max_length`, `is_bounded` (longer texts are refused), `tensors()`, which a checkpoint must have, and
    `optional()`, which it may have. `theirs` gives a checkpoint's name of such a tensor; `prefix` is what some checkpoints leave
    out of all names; other tensors may be left unread where `is_unread` says so.

    `mask` is the id of the mask token where none of the fields `mask_keys` of config.json has one, nor the tokenizer under the
    name `mask_token`; with `mask_is_last` it is always the last id. `block` is the block size where none of `block_keys` is in
    config.json. `shift`, `left_shift` and `prompt_block`, and `ends`, the special tokens that end a turn of a chat, are as in
    ModelInfo and `stop_ids`.
    """

    name: str
    kind: ModelKind
    shape: Callable[[Config], Any]
    theirs: Callable[[str], str] = lambda name: name
    prefix: str = ""
    is_unread: Callable[[str], bool] = _is_frequency
    mask: int | None = None
    mask_keys: tuple[str, ...] = MASK_KEYS
    mask_token: str = ""
    mask_is_last: bool = False
    block: int | None = None
    block_keys: tuple[str, ...] = ()
    shift: int = 0
    left_shift: int | None = None
    prompt_block: bool = False
    ends: tuple[str, ...] = ()

    @property
    def rows_are_tokens(self) -> bool:
        """Whether every row carries a token; two-stream models have rows that don't."""
        return self.kind != "any_subset"

    def weight_shapes(self, config: Config) -> Shapes:
        """Every tensor that a checkpoint must have by its name there, with its shape."""
        return {self.theirs(name): shape for name, shape in self.shape(config).tensors().items()}

    def full_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map a checkpoint's names to those with the family's prefix, which some checkpoints lack."""
        names = list(names)
        is_bare = not any(name.startswith(self.prefix) for name in names)
        return {name: self.prefix + name if is_bare and not name.startswith(_HEADS) else name for name in names}

    def own_names(self, config: Config, tensors: Mapping[str, T]) -> dict[str, T]:
        """The tensors of a checkpoint by the names of the network that runs it, without those that are left unread."""
        shape, full = self.shape(config), self.full_names(tensors)
        own = {self.theirs(name): name for name in (*shape.tensors(), *shape.optional())}
        return {own[full[name]]: tensor for name, tensor in tensors.items() if full[name] in own}

    def mask_id(self, config: Config) -> int | None:
        """The id of the mask token; ValueError if config.json has an invalid one."""
        if self.mask is None:
            return self.shape(config).vocab_size - 1 if self.mask_is_last else None
        return token_id(config, _first(config, self.mask_keys), self.mask)

    def block_size(self, config: Config) -> int | None:
        """The block size of the training; ValueError if config.json has an invalid one."""
        with fitting(self.name):
            return whole(config, _first(config, self.block_keys), self.block) if self.block else None


# Output layers, which have no prefix.
_HEADS: Final = ("lm_head.", "embed_out.")


def _first(config: Config, keys: tuple[str, ...]) -> str:
    """The first of the keys that config.json has; an empty one if it has none."""
    return next((key for key in keys if config.get(key) is not None), "")


def _like(like: Like, name: str, kind: ModelKind, reads: Mapping[str, Any] | None = None, **facts: Any) -> Family:
    """A family on network.py whose config.json is that of family `like`; `reads` as `rotary_shape` takes it."""
    facts.setdefault("prefix", "model.")
    return Family(name, kind, partial(rotary_shape, name=name, like=like, **(reads or {})), **facts)


_SDAR: Final[dict[str, Any]] = {
    "mask": 151669,
    "mask_token": "<|MASK|>",
    "block": 4,
    "block_keys": ("block_size", "block_length"),
    "ends": ("<|im_end|>",),
}
_NO_WINDOWS: Final = {"built": FULL_ATTENTION}
_NO_WINDOWS_MOE: Final = {"built": FULL_ATTENTION | {"hidden_act": ("silu",)}}
_LLADA: Final = {"built": LLADA_BUILT, "translate": llada_as_llama}
_LLADA_MOE: Final = {"built": LLADA_MOE_BUILT, "translate": llada_moe_as_qwen3}
_FAMILIES: Final = (
    Family("xlnet", "any_subset", xlnet_shape, mask=6, mask_keys=()),
    _like("llama", "llama", "causal", shift=1),
    _like("mistral", "mistral", "causal", shift=1),
    _like("qwen2", "qwen2", "causal", shift=1),
    _like("qwen3", "qwen3", "causal", shift=1),
    _like(
        "llama", "llada", "masked", _LLADA, theirs=llada_name, prefix=LLADA_PREFIX, mask=126336, ends=("<|eot_id|>",)
    ),
    _like("qwen3_moe", "llada_moe", "masked", _LLADA_MOE, mask=156895, mask_token="<|mask|>", ends=("<|role_end|>",)),
    Family("dream", "masked", dream_shape, prefix="model.", mask=151666, shift=1, ends=("<|im_end|>",)),
    _like("qwen3", "sdar", "blocks", _NO_WINDOWS, **_SDAR),
    _like("qwen3_moe", "sdar_moe", "blocks", _NO_WINDOWS_MOE, **_SDAR),
    _like(
        "qwen2",
        "fast_dllm_v2",
        "blocks",
        _NO_WINDOWS,
        mask=151665,
        mask_token="|<MASK>|",
        block=32,
        block_keys=("bd_size", "block_size"),
        shift=1,
        ends=("<|im_end|>",),
    ),
    Family(
        "llada2",
        "blocks",
        llada2_shape,
        theirs=llada2_name,
        mask=156895,
        mask_token="<|mask|>",
        block=32,
        block_keys=("block_size", "block_length"),
        ends=("<|role_end|>",),
    ),
    Family(
        "nemotron_labs_diffusion",
        "blocks",
        nemotron_shape,
        theirs=nemotron_name,
        prefix="encoder.",
        mask=100,
        block=32,
        block_keys=("block_size",),
        left_shift=1,
        prompt_block=True,
    ),
    Family(
        "mdlm", "ancestral", mdlm_shape, theirs=lambda name: f"backbone.{name}", prefix="backbone.", mask_is_last=True
    ),
    Family("sedd", "ancestral", sedd_shape, mask_is_last=True),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


def _forced(name: str) -> Family:
    """A masked model that was trained by discrete diffusion forcing (D2F; Wang et al., 2025, and its public code): the same
    network, which sees blocks of a text one after the other. They had 16 tokens in training."""
    return dataclasses.replace(FAMILIES[name], name=f"d2f_{name}", kind="blocks", prompt_block=True, block=16)


# No config says that a model was trained so: the user does.
FAMILIES |= {family.name: family for family in (_forced("llada"), _forced("dream"))}


# The `model_type` in config.json of families that have another name here.
_MODEL_TYPES = {
    "Dream": "dream",
    "Fast_dLLM_Qwen": "fast_dllm_v2",
    "llada2_moe": "llada2",
    "lladamoe": "llada_moe",
}


def masked_diffusion_families() -> tuple[str, ...]:
    """The families of masked-diffusion models; every row carries a token, unlike in two-stream models."""
    return tuple(sorted(name for name, family in FAMILIES.items() if family.kind in {"masked", "ancestral"}))


def find_family(config: Config, requested: str) -> Family:
    """Return the family named by the user, or the one of config.json's `model_type` where that is 'auto'. Raises ValueError
    with the field path, the value and the known families."""
    name = _recognise(config) if requested == "auto" else requested
    if name in FAMILIES:
        return FAMILIES[name]
    if any_causal.is_causal(name):
        return _outside(name)
    source = "config.json has model_type" if requested == "auto" else "given as"
    raise ValueError(
        f"model.family: {source} {name!r}; known families: {', '.join(sorted(FAMILIES))}, and the causal models of transformers "
        f"{any_causal.version()}"
    )


def _outside(name: str) -> Family:
    """A causal model of transformers that the table does not have."""
    return Family(
        name,
        "causal",
        partial(any_causal.facts, name),
        prefix=any_causal.prefix(name),
        is_unread=partial(any_causal.is_unread, name),
        shift=1,
    )


def _recognise(config: Config) -> str:
    """Return the family that `model_type` stands for; SEDD's checkpoints and the training runs of MDLM have none, and LLaDA-MoE's
    have that of LLaDA."""
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


def describe(family: Family, config: Config, *, mask_id: int | None, max_length: int | None) -> ModelInfo:
    """Describe a checkpoint from its config alone; raises ValueError if config.json does not fit."""
    shape = family.shape(config)
    mask = _mask_id(family, config, mask_id, shape.vocab_size)
    return ModelInfo(
        family=family.name,
        vocab_size=shape.vocab_size,
        mask_id=mask,
        max_length=_max_length(family, config, shape, max_length),
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
    if mask_id is not None and own is None:
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


def _max_length(family: Family, config: Config, shape: Any, asked: int | None) -> int | None:
    """The user's value, else the one under `draftmill` in config.json, else the public one in config.json."""
    ours, public = config.get("draftmill") or {}, shape.max_length
    if not isinstance(ours, Mapping):
        raise ValueError(f"model.path: config.json has draftmill = {ours!r}; allowed: an object")
    with fitting(family.name):
        own = None if ours.get("max_length") is None else whole(ours, "max_length")
    if isinstance(public, int) and public > _MOST_POSITIONS:
        raise ValueError(f"model.path: config.json has texts of {public:,} tokens; allowed: up to {_MOST_POSITIONS:,}")
    length = next((value for value in (asked, own, public) if value is not None), None)
    if length is not None and public is not None and length > public and shape.is_bounded:
        raise ValueError(f"model.max_length: {length}, but the model's positions end at {public}")
    return length
