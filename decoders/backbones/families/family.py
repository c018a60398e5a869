"""What is known of a family of models: how its config.json is read, the names of its tensors, its mask and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from draftmill.decoders.backbones.families.causal import Like, rotary_shape
from draftmill.decoders.backbones.families.config import Config, Supported, fitting, whole
from draftmill.decoders.backbones.families.rotary import Shapes
from draftmill.decoders.base import ModelKind

T = TypeVar("T")
MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""
_BLOCK_KEYS: Final = ("bd_size", "block_size", "block_length")
_HEADS: Final = ("lm_head.", "embed_out.")  # output layers, which have no prefix


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    `shape` reads config.json: a RotaryShape, DDiTShape, XLNetShape or CausalFacts, whose network runs the model. Each has
    `vocab_size`, `max_length`, `is_bounded` (longer texts are refused), `tensors()`, which a checkpoint must have, and
    `optional()`, which it may have. `theirs` gives a checkpoint's name of such a tensor; `prefix` is what some checkpoints leave
    out of all names; other tensors may be left unread where `is_unread` says so.

    `mask` is the id of the mask token if config.json has none, nor the tokenizer under the name `mask_token`; with `mask_is_last`
    it is always the last id. `block` is the block size if config.json has none. `shift`, `left_shift` and `prompt_block` are as
    in ModelInfo; `ends` are the special tokens that end a turn of a chat.
    """

    name: str
    kind: ModelKind
    shape: Callable[[Config], Any]
    theirs: Callable[[str], str] = lambda name: name
    prefix: str = ""
    is_unread: Callable[[str], bool] = lambda name: name.endswith("rotary_emb.inv_freq")
    mask: int | None = None
    mask_token: str = ""
    mask_is_last: bool = False
    block: int | None = None
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
        with fitting(self.name):
            return whole(config, _first(config, MASK_KEYS), self.mask, least=0)

    def block_size(self, config: Config) -> int | None:
        """The block size of the training; ValueError if config.json has an invalid one."""
        with fitting(self.name):
            return whole(config, _first(config, _BLOCK_KEYS), self.block) if self.block else None


def _first(config: Config, keys: tuple[str, ...]) -> str:
    """The first of the keys that config.json has; an empty one if it has none."""
    return next((key for key in keys if config.get(key) is not None), "")


def rotary_family(
    name: str,
    kind: ModelKind,
    like: Like,
    built: Supported | None = None,
    translate: Callable[[Config], Config] = lambda config: config,
    **facts: Any,
) -> Family:
    """A family on network.py whose config.json is that of family `like`; `built` and `translate` as `rotary_shape` takes them."""
    shape = partial(rotary_shape, name=name, like=like, built=built, translate=translate)
    return Family(name, kind, shape, **{"prefix": "model."} | facts)
