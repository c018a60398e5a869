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
from typing import TYPE_CHECKING, Any, Final

from draftmill.decoders.backbones.families import any_causal
from draftmill.decoders.backbones.families import blocks as block_families
from draftmill.decoders.backbones.families import causal as causal_families
from draftmill.decoders.backbones.families import masked as masked_families
from draftmill.decoders.backbones.families.blocks import BlockFacts
from draftmill.decoders.backbones.families.causal import CAUSAL_FAMILIES, CausalFamily
from draftmill.decoders.backbones.families.config_fields import numbers, token_id
from draftmill.decoders.backbones.families.llada2 import llada2_names, llada2_shape, llada2_shapes
from draftmill.decoders.backbones.families.masked import DDiTShape
from draftmill.decoders.backbones.families.rotary import RotaryShape
from draftmill.decoders.backbones.families.xlnet import xlnet_optional, xlnet_shape, xlnet_shapes
from draftmill.decoders.base import ModelInfo, ModelKind

if TYPE_CHECKING:
    from torch import Tensor

# More than any published model has; memory is allocated by this number.
_MOST_POSITIONS: Final = 1 << 24

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. `weight_shapes` names every tensor the checkpoint must have; `optional` ones it may have.

    `full_names` maps the names in a checkpoint to those; `is_unread` says which others may be left unread. `mask_id` gives the
    id of the mask token, `has_mask` says whether there is one, `fixed_mask` that users cannot change it, and `mask_token` is its
    name in a tokenizer, used if config.json has no id; `max_length` reads the longest text from config.json. `shift`,
    `left_shift`, `prompt_block` and `block_size`, and `ends`, the special tokens that end a turn of a chat, are as in ModelInfo
    and `stop_ids`.
    `rotary` is set for the families that run on network.py, `ddit` for those on ddit.py, `any_causal` for causal models
    of transformers, which are not in the table. `convert` gives weights the names that these have.
    Texts are at most `max_length` tokens if `is_bounded`.
    """

    name: str
    kind: ModelKind
    mask_id: Callable[[Config], int | None]
    vocab_size: Callable[[Config], int]
    weight_shapes: Callable[[Config], dict[str, tuple[int, ...]]]
    optional: Callable[[Config], set[str]]
    check: Callable[[Config], object]
    full_names: Callable[[Iterable[str]], dict[str, str]] = lambda names: {name: name for name in names}
    is_unread: Callable[[str], bool] = lambda name: False
    has_mask: bool = True
    fixed_mask: bool = False
    mask_token: str = ""
    max_length: Callable[[Config], int | None] = lambda config: None
    is_bounded: Callable[[Config], bool] = lambda config: False
    shift: int = 0
    left_shift: int | None = None
    prompt_block: bool = False
    block_size: Callable[[Config], int | None] = lambda config: None
    ends: tuple[str, ...] = ()
    causal: CausalFamily | None = None
    ddit: Callable[[Config], DDiTShape] | None = None
    rotary: Callable[[Config], RotaryShape] | None = None
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    any_causal: bool = False

    @property
    def rows_are_tokens(self) -> bool:
        """Whether every row carries a token; two-stream models have rows that don't."""
        return any((self.causal, self.ddit, self.rotary, self.any_causal))


def _causal(family: CausalFamily) -> Family:
    return Family(
        name=family.name,
        kind="causal",
        mask_id=lambda config: None,
        vocab_size=partial(causal_families.vocab_size, family),
        weight_shapes=partial(causal_families.weight_shapes, family),
        optional=partial(causal_families.optional_names, family),
        check=partial(causal_families.read_config, family),
        full_names=partial(causal_families.full_names, family),
        has_mask=False,
        max_length=partial(causal_families.max_positions, family),
        shift=1,
        causal=family,
        rotary=partial(causal_families.rotary_shape, family),
        convert=family.convert,
    )


def _ddit(name: str, shape: Callable[[Config], DDiTShape], prefix: str) -> Family:
    return Family(
        name=name,
        kind="ancestral",
        mask_id=lambda config: shape(config).vocab_size - 1,
        fixed_mask=True,
        vocab_size=lambda config: shape(config).vocab_size,
        weight_shapes=lambda config: masked_families.ddit_shapes(shape(config), prefix),
        optional=lambda config: {prefix + "rotary_emb.inv_freq"},
        check=shape,
        full_names=partial(masked_families.ddit_names, prefix),
        max_length=lambda config: shape(config).max_length,
        ddit=shape,
    )


def _with_facts(family: Family, facts: BlockFacts) -> Family:
    return dataclasses.replace(
        family,
        kind="blocks",
        mask_id=facts.find_mask,
        has_mask=True,
        mask_token=facts.mask_token,
        shift=facts.shift,
        left_shift=facts.left_shift,
        prompt_block=facts.prompt_block,
        block_size=facts.find_block,
        ends=facts.ends,
    )


_LLADA2 = Family(
    name="llada2",
    kind="blocks",
    mask_id=block_families.LLADA2.find_mask,
    vocab_size=lambda config: llada2_shape(config).vocab_size,
    weight_shapes=llada2_shapes,
    optional=lambda config: set(),
    check=llada2_shape,
    max_length=lambda config: llada2_shape(config).max_position_embeddings,
    rotary=llada2_shape,
    convert=llada2_names,
)

FAMILIES: dict[str, Family] = {
    "xlnet": Family(
        name="xlnet",
        kind="any_subset",
        mask_id=lambda config: 6,
        vocab_size=lambda config: xlnet_shape(config).vocab_size,
        weight_shapes=xlnet_shapes,
        optional=xlnet_optional,
        check=xlnet_shape,
    ),
    **{family.name: _causal(family) for family in CAUSAL_FAMILIES},
    "llada": dataclasses.replace(
        _causal(masked_families.LLADA),
        kind="masked",
        mask_id=partial(token_id, key="mask_token_id", default=masked_families.LLADA_MASK),
        has_mask=True,
        weight_shapes=masked_families.llada_shapes,
        # A tied checkpoint may still hold its output layer.
        optional=lambda config: (
            {masked_families.LLADA_PREFIX + "ff_out.weight"} if config.get("weight_tying") else set()
        ),
        shift=0,
        ends=("<|eot_id|>",),
    ),
    "llada_moe": dataclasses.replace(
        _causal(masked_families.LLADA_MOE),
        kind="masked",
        mask_id=partial(token_id, key="mask_token_id", default=masked_families.LLADA_MOE_MASK),
        has_mask=True,
        mask_token="<|mask|>",
        shift=0,
        ends=("<|role_end|>",),
    ),
    "dream": dataclasses.replace(
        _causal(masked_families.DREAM),
        kind="masked",
        mask_id=partial(token_id, key="mask_token_id", default=masked_families.DREAM_MASK),
        has_mask=True,
        max_length=masked_families.dream_length,
        ends=("<|im_end|>",),
    ),
    **{family.name: _with_facts(_causal(family), facts) for family, facts in block_families.QWEN_FAMILIES},
    "llada2": _with_facts(_LLADA2, block_families.LLADA2),
    "nemotron_labs_diffusion": dataclasses.replace(
        _with_facts(_causal(block_families.NEMOTRON), block_families.NEMOTRON_FACTS),
        weight_shapes=block_families.nemotron_shapes,
        max_length=block_families.nemotron_length,
        is_bounded=lambda config: True,
    ),
    "mdlm": _ddit("mdlm", masked_families.mdlm_shape, "backbone."),
    "sedd": _ddit("sedd", masked_families.sedd_shape, ""),
}


def _forced(name: str) -> Family:
    """A masked model that was trained by discrete diffusion forcing (D2F; Wang et al., 2025, and its public code): the same
    network, which sees blocks of a text one after the other. They had 16 tokens in training."""
    return dataclasses.replace(
        FAMILIES[name],
        name=f"d2f_{name}",
        kind="blocks",
        prompt_block=True,
        block_size=lambda config: 16,
    )


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

    def known(config: Config) -> any_causal.CausalFacts:
        return any_causal.facts(name, config)

    return Family(
        name=name,
        kind="causal",
        mask_id=lambda config: None,
        vocab_size=lambda config: known(config).vocab_size,
        weight_shapes=lambda config: known(config).shapes,
        optional=lambda config: set(known(config).tied),
        check=known,
        full_names=partial(any_causal.full_names, name),
        is_unread=partial(any_causal.is_unread, name),
        has_mask=False,
        max_length=lambda config: known(config).max_position_embeddings,
        is_bounded=lambda config: known(config).is_bounded,
        shift=1,
        any_causal=True,
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
    family.check(config)
    vocab_size = family.vocab_size(config)
    mask = _mask_id(family, config, mask_id, vocab_size)
    shapes = family.weight_shapes(config)
    return ModelInfo(
        family=family.name,
        vocab_size=vocab_size,
        mask_id=mask,
        max_length=_max_length(family, config, max_length),
        kind=family.kind,
        num_parameters=sum(prod(shape) for shape in shapes.values()),
        suppressed=() if mask is None else (mask,),
        shift=family.shift,
        left_shift=family.left_shift,
        prompt_block=family.prompt_block,
        block_size=family.block_size(config),
    )


def _mask_id(family: Family, config: Config, mask_id: int | None, vocab_size: int) -> int | None:
    if mask_id is not None and not family.has_mask:
        raise ValueError(f"model.mask_id: {mask_id} given, but models of family {family.name!r} have no mask token")
    own = family.mask_id(config)
    if family.fixed_mask and mask_id not in {None, own}:
        raise ValueError(
            f"model.mask_id: {mask_id} given, but in models of family {family.name!r} it is the last id, {own}"
        )
    mask = own if mask_id is None else mask_id
    if mask is not None and not 0 <= mask < vocab_size:
        origin = "" if mask_id is not None else " (by config.json, or the family's default)"
        raise ValueError(f"model.mask_id: {mask} is outside the vocabulary; allowed: 0 .. {vocab_size - 1}{origin}")
    return mask


def _max_length(family: Family, config: Config, asked: int | None) -> int | None:
    """The user's value, else the one under `draftmill` in config.json, else the public one in config.json."""
    ours, public = config.get("draftmill") or {}, family.max_length(config)
    if not isinstance(ours, Mapping):
        raise ValueError(f"model.path: config.json has draftmill = {ours!r}; allowed: an object")
    held = ours.get("max_length") is not None
    own = numbers(ours, {"max_length": "max_length"}, family.name)["max_length"] if held else None
    if isinstance(public, int) and public > _MOST_POSITIONS:
        raise ValueError(f"model.path: config.json has texts of {public:,} tokens; allowed: up to {_MOST_POSITIONS:,}")
    length = next((value for value in (asked, own, public) if value is not None), None)
    if length is not None and public is not None and length > public and family.is_bounded(config):
        raise ValueError(f"model.max_length: {length}, but the model's positions end at {public}")
    return length
