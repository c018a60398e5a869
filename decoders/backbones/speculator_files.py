"""The files of a published draft head in the `speculators` format: what its config.json says, and whether it fits a model.

Imports no torch; speculators.py runs the heads. Sources: EAGLE-3 (Li et al., 2025), DFlash (Chen et al., 2026), and the format as
package `speculators` 0.9.0 writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftmill.decoders.backbones.checkpoint import header_shapes, read_config
from draftmill.decoders.backbones.families.config_fields import FIELDS
from draftmill.decoders.base import ModelInfo

_PATH: Final = "decoder.drafter.path"
_KINDS: Final = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}
_LAYERS: Final = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """A head of a `kind`. It reads the target's states after each of `layer_ids` layers, has layers of its own by transformers'
    `config_class` with `fields`, and `draft_vocab` tokens. `flags` are the switches of an EAGLE-3 head. A DFlash head drafts in
    blocks: the last token and masks, `block_size` in all, whose first row drafts if `from_anchor`."""

    kind: str
    layer_ids: tuple[int, ...]
    config_class: str
    fields: Mapping[str, Any]
    draft_vocab: int
    flags: frozenset[str]
    block_size: int
    mask_id: int
    from_anchor: bool

    @property
    def most_drafts(self) -> int | None:
        """How many tokens it drafts at most; None if any number."""
        return None if self.kind == "eagle3" else self.block_size - (not self.from_anchor)


def read_speculator(folder: Path) -> SpeculatorConfig:
    """Read a head's config.json; ValueError if it is of another format, or has what is not supported."""
    config = read_config(folder)
    kind = config.get("speculators_model_type")
    if kind not in _KINDS:
        raise ValueError(
            f"{_PATH}: {folder}: config.json has speculators_model_type = {kind!r}; allowed: {', '.join(_KINDS)}"
        )
    fields = config.get("transformer_layer_config") or {}
    layers, ids = fields.get("model_type", "qwen3"), config.get(_KINDS[kind])
    if layers not in _LAYERS:
        raise ValueError(f"{_PATH}: {folder}: layers of model_type {layers!r}; allowed: {', '.join(_LAYERS)}")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ValueError(f"{_PATH}: {folder}: layer_types holds sliding_attention; allowed: full_attention")
    if not isinstance(ids, list) or len({number for number in ids if isinstance(number, int)}) != len(ids) or not ids:
        raise ValueError(f"{_PATH}: {folder}: {_KINDS[kind]} = {ids!r}; allowed: a list of different numbers of layers")
    flags = {name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if config.get(name)}
    block_size, mask_id = config.get("block_size", 8), config.get("mask_token_id")
    if kind == "dflash" and (mask_id is None or block_size < 2):
        raise ValueError(
            f"{_PATH}: {folder}: mask_token_id = {mask_id}, block_size = {block_size}; allowed: a token, and 2 or more"
        )
    return SpeculatorConfig(
        kind=kind,
        layer_ids=tuple(ids),
        config_class=_LAYERS[layers],
        fields={key: value for key, value in fields.items() if not key.startswith("_")},
        draft_vocab=int(config.get("draft_vocab_size", 32000)),
        flags=frozenset(flags),
        block_size=int(block_size),
        mask_id=-1 if mask_id is None else int(mask_id),
        from_anchor=bool(config.get("sample_from_anchor")),
    )


def check_speculator(folder: Path, target: Path, info: ModelInfo) -> SpeculatorConfig:
    """Return the head's config; ValueError as read_speculator, and where the head does not fit the target model in its folder:
    its vocabulary, the width of the states that it reads, or the numbers of layers."""
    head, model = read_speculator(folder), read_config(target)
    num_layers = next((model[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in model), None)
    width = next((model[key] for key in ("hidden_size", "n_embd", "d_model") if key in model), None)
    # A file holds the fields that differ from the defaults of transformers.
    vocab_size = head.fields.get("vocab_size", FIELDS[head.config_class]["vocab_size"][1])
    if vocab_size != info.vocab_size:
        raise ValueError(f"{_PATH}: {folder} is for {vocab_size} ids; the model has {info.vocab_size}")
    if num_layers is not None and not all(1 <= number <= num_layers for number in head.layer_ids):
        raise ValueError(f"{_PATH}: {folder} reads the layers {list(head.layer_ids)}; allowed here: 1 to {num_layers}")
    shapes = header_shapes(folder)
    read = shapes.get("fc.weight", (0, 0))[1]
    if width is not None and read != len(head.layer_ids) * width:
        raise ValueError(
            f"{_PATH}: {folder} reads {read} numbers of {len(head.layer_ids)} layers; this model's layers have {width} each"
        )
    has_vocabulary = "d2t" in shapes and shapes["d2t"] == (head.draft_vocab,)
    if head.draft_vocab != info.vocab_size and not has_vocabulary:
        raise ValueError(
            f"{_PATH}: {folder} drafts {head.draft_vocab} of {info.vocab_size} ids; its d2t must name them"
        )
    return head
