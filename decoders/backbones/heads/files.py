"""The files of draft heads, read without torch: our own, which correct drafts (markov.py), published ones (published.py), and
adapters of masks (adapter.py).

A head of ours is `draft_head.json`, its sizes and kind, and `draft_head.safetensors`. A published one is a folder in the format
of package `speculators` 0.9.0; an adapter is one of PEFT's.

Sources: EAGLE-3 (Li et al., 2025), DFlash (Chen et al., 2026). Legend: H = hidden width of a head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Final, Literal, cast

from draftmill.decoders.backbones import checkpoint
from draftmill.decoders.backbones.families.causal import rotary_shape
from draftmill.decoders.backbones.families.config import Supported, positive, refused, whole, word
from draftmill.decoders.backbones.families.config import demand as demand_values
from draftmill.decoders.backbones.families.rotary import RotaryShape, Shapes, product_shapes
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import DecoderChoice

# ---- our own ---------------------------------------------------------------------------------------------------------

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
MAX_DISTANCE: Final = 16
MAX_UNSEEN: Final = 8

HeadKind = Literal["assd", "specdiff", "s2d2"]
"""The decoder that a head was trained for; it is useless for the others."""


def read_sizes(folder: Path, kind: HeadKind) -> dict[str, int] | None:
    """The sizes of the heads in a folder; None if it has none. ValueError if a file is missing, or they are of another kind."""
    path, weights = folder / CONFIG, folder / WEIGHTS
    if not path.exists() and not weights.exists():
        return None
    if not (path.exists() and weights.exists()):
        raise ValueError(f"decoder.head: {folder} needs both {CONFIG} and {WEIGHTS}")
    if problem := checkpoint.pointer_problem(weights):
        raise ValueError(f"decoder.head: {problem}")
    sizes = checkpoint.read_object(path, "decoder.head") or {}
    # The files of the first heads don't name their kind, since there was only one.
    kinds = (kind, None) if kind == "assd" else (kind,)
    with refused(f"decoder.head: {path}", ValueError):
        if surplus := sizes.keys() - {"kind", "width", "markov_hidden"}:
            raise ValueError(f"it has {', '.join(sorted(surplus))}; allowed: kind, width, markov_hidden")
        numbers = {key: whole(sizes, key) for key in ("width", "markov_hidden")}
        demand_values({"kind": None} | sizes, {"kind": kinds})
    return numbers


def head_place(settings: DecoderChoice, folder: Path) -> tuple[Path, HeadKind] | None:
    """The folder and kind of the draft head that the settings name ('auto': `folder`); None without one. ValueError if it has
    none."""
    head = settings.draft_head
    if head == "none":
        return None
    kind = cast("HeadKind", settings.head_kind)
    if head == "auto":
        return folder, kind
    place = Path(head).expanduser()
    if read_sizes(place, kind) is None:
        raise ValueError(f"decoder.head: {head} has no {CONFIG} and {WEIGHTS}")
    return place, kind


def check_heads(settings: DecoderChoice, folder: Path) -> None:
    """Raise ValueError if the named draft head, or the one in `folder`, does not fit the decoder, or its weights its sizes."""
    place = head_place(settings, folder)
    sizes = None if place is None else read_sizes(*place)
    if place is None or sizes is None:
        return
    width, hidden = sizes["width"], sizes["markov_hidden"]
    expected: Shapes = dict.fromkeys(("distance_prev.weight", "distance_before.weight"), (2 * MAX_DISTANCE + 1, width))
    expected |= {"age.weight": (MAX_UNSEEN + 1, width), "norm.weight": (3 * width,), "norm.bias": (3 * width,)}
    expected |= product_shapes("up", hidden, 3 * width) | product_shapes("down", width, hidden)
    config, path = place[0] / CONFIG, place[0] / WEIGHTS
    found = checkpoint.file_tensors(path, checkpoint.stored_shape, "np", field="decoder.head")
    if found != {f"markov.{name}": shape for name, shape in expected.items()}:
        raise ValueError(f"decoder.head: {path} does not fit {config}")


# ---- published heads -------------------------------------------------------------------------------------------------

_PATH: Final = "decoder.drafter.path"
_BLOCKS: Final = "aux_hidden_state_layer_ids"
_KINDS: Final = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": _BLOCKS, "dspark": _BLOCKS}
_LAYERS: Final = ("llama", "qwen3")
_FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """A head of a `kind`. It reads the target's states after each of `layer_ids` layers, has layers of its own of the sizes
    `parsed`, and `draft_vocab` tokens. `flags` are the switches of an EAGLE-3 head. A DFlash head drafts in blocks: the last
    token and masks, `block_size` in all, whose first row drafts if `from_anchor`. A DSpark head is one that also adds to a
    draft's logits what follows from the token before it, by matrices of `markov_rank`, 0 without them; `is_gated` by its state.
    """

    kind: str
    layer_ids: tuple[int, ...]
    parsed: RotaryShape
    draft_vocab: int
    flags: frozenset[str]
    block_size: int
    mask_id: int
    from_anchor: bool
    markov_rank: int
    is_gated: bool

    @property
    def most_drafts(self) -> int | None:
        """The largest number of tokens that it drafts; None without a limit."""
        return None if self.kind == "eagle3" else self.block_size - (not self.from_anchor)

    def shapes(self, width_read: int) -> Shapes:
        """The tensors of its file, for a target with states of this width; what it may share with the target included."""
        width, num_read = self.parsed.hidden_size, len(self.layer_ids) * width_read
        shapes = {name.removeprefix("model."): shape for name, shape in self.parsed.tensors().items()}
        shapes |= {"fc.weight": (width, num_read), "lm_head.weight": (self.draft_vocab, width)}
        if self.kind != "eagle3":
            rank = self.markov_rank
            if rank:
                shapes["markov_head.markov_w1.weight"] = (self.parsed.vocab_size, rank)
                shapes["markov_head.markov_w2.weight"] = (self.draft_vocab, rank)
            if self.is_gated:
                shapes |= product_shapes("markov_head.gate_proj", rank, width + rank)
            return shapes | {"hidden_norm.weight": (width,)}
        for letter in "qkv":
            name = f"layers.0.self_attn.{letter}_proj.weight"
            shapes[name] = (shapes[name][0], 2 * width)
        if "norm_before_fc" in self.flags:
            shapes["input_norm.weight"] = (num_read,)
        if "fc_norm" in self.flags:
            shapes |= {f"fc_norm.{index}.weight": (width_read,) for index in range(len(self.layer_ids))}
        return shapes | {"layers.0.hidden_norm.weight": (width,)}


def read_speculator(folder: Path) -> SpeculatorConfig:
    """Read a head's config.json; ValueError if it is of another format, or has what is not supported."""
    config = checkpoint.read_config(folder)

    def demand(holds: bool, problem: str) -> None:
        if not holds:
            raise ValueError(f"{_PATH}: {folder}: {problem}")

    kind, fields = config.get("speculators_model_type"), config.get("transformer_layer_config") or {}
    demand(kind in _KINDS, f"config.json has speculators_model_type = {word(kind)}; allowed: {', '.join(_KINDS)}")
    demand(isinstance(fields, dict), f"config.json has transformer_layer_config = {fields!r}; allowed: an object")
    layers, key = fields.get("model_type", "qwen3"), _KINDS[str(kind)]
    demand(layers in _LAYERS, f"layers of model_type {layers!r}; allowed: {', '.join(_LAYERS)}")
    parsed = rotary_shape(fields, name=layers, like=layers)
    demand(parsed.hidden_act == "silu", f"hidden_act = {parsed.hidden_act!r}; allowed: silu")
    demand(not any(parsed.windows), "layer_types holds sliding_attention; allowed: full_attention")
    ids, vocab = config.get(key), config.get("draft_vocab_size", 32000)
    are_ids = isinstance(ids, list) and all(isinstance(one, int) for one in ids) and len(set(ids)) == len(ids) > 0
    demand(are_ids, f"{key} = {ids!r}; allowed: a list of different numbers of layers")
    demand(isinstance(vocab, int), f"draft_vocab_size = {vocab!r}; allowed: a number of ids")
    size, mask = config.get("block_size", 8), config.get("mask_token_id")
    is_block = isinstance(size, int) and size >= 2 and isinstance(mask, int)
    problem = f"mask_token_id = {word(mask)}, block_size = {word(size)}; allowed: an id, and 2 or more"
    demand(kind == "eagle3" or is_block, problem)
    has_markov = kind == "dspark"
    rank = config.get("markov_rank", 256) if has_markov else 0
    form = config.get("markov_head_type", "vanilla") if has_markov else "vanilla"
    demand(isinstance(rank, int) and rank >= 0, f"markov_rank = {rank!r}; allowed: 0 or more")
    demand(form in {"vanilla", "gated"}, f"markov_head_type = {form!r}; allowed: vanilla, gated")
    return SpeculatorConfig(
        kind=str(kind),
        layer_ids=tuple(ids or ()),
        parsed=parsed,
        draft_vocab=vocab,
        flags=frozenset(name for name in _FLAGS if config.get(name)),
        block_size=size,
        mask_id=-1 if mask is None else mask,
        from_anchor=bool(config.get("sample_from_anchor", has_markov)),
        markov_rank=rank,
        is_gated=form == "gated" and rank > 0,
    )


def check_speculator(folder: Path, target: Path, info: ModelInfo) -> None:
    """Raise ValueError as read_speculator, and where the head does not fit the target model in its folder: its vocabulary, the
    numbers of layers, or the shape of a tensor."""
    head, config = read_speculator(folder), checkpoint.read_config(target)
    found = checkpoint.each_tensor(folder, checkpoint.stored_shape, "np")
    shape = find_family(config, info.family).shape(config)
    num_layers, width = shape.num_hidden_layers, shape.hidden_size
    vocab_size = head.parsed.vocab_size
    if vocab_size != info.vocab_size:
        raise ValueError(f"{_PATH}: {folder} is for {vocab_size} ids; the model has {info.vocab_size}")
    if not all(1 <= number <= num_layers for number in head.layer_ids):
        raise ValueError(f"{_PATH}: {folder} reads the layers {list(head.layer_ids)}; allowed here: 1 to {num_layers}")
    expected = head.shapes(width)
    if head.draft_vocab != vocab_size:
        expected["d2t"] = (head.draft_vocab,)
    for name, size in expected.items():
        is_shared = name not in found and name in {"embed_tokens.weight", "lm_head.weight"}
        if found.get(name) != size and not is_shared:
            shape = found.get(name, "none")
            raise ValueError(
                f"{_PATH}: {folder}: {name} has shape {shape}; allowed by its config.json and the model's: {size}"
            )


# ---- adapters of masks -----------------------------------------------------------------------------------------------

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTED: Final = re.compile(
    r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.lora_(A|B)\.weight"
)
_PLAIN_LORA: Final[Supported] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
}


def read_adapter(folder: Path, shape: Any) -> float:
    """The factor of a plain LoRA's products BA; ValueError where it is another adapter, or does not fit a network's `shape`."""
    config = checkpoint.read_object(folder / ADAPTER_CONFIG, _PATH)
    if config is None or not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"{_PATH}: {folder} needs both {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    found = checkpoint.file_tensors(folder / ADAPTER_WEIGHTS, checkpoint.stored_shape, "np", _PATH)
    with refused(f"{_PATH}: {folder} is no LoRA adapter for the rows of masks", ValueError):
        if not isinstance(shape, RotaryShape):
            raise ValueError("the model does not run by our own network, which alone has such rows")
        if not found:
            raise ValueError(f"{ADAPTER_WEIGHTS} has no tensors")
        demand_values(config, _PLAIN_LORA)
        rank, alpha, sizes = whole(config, "r"), positive(config, "lora_alpha"), shape.tensors()
        expected = dict[str, tuple[int, ...]]()
        for name in found:
            parts = _ADAPTED.fullmatch(name)
            if parts is None or f"{parts[1]}.weight" not in sizes:
                raise ValueError(f"{name} is no part of a product in the model's layers")
            num_out, num_in = sizes[f"{parts[1]}.weight"]
            expected |= {name.replace(f"lora_{parts[2]}", "lora_A"): (rank, num_in)}
            expected |= {name.replace(f"lora_{parts[2]}", "lora_B"): (num_out, rank)}
        for name, size in expected.items():
            if found.get(name) != size:
                raise ValueError(f"{name} has shape {found.get(name, 'none')}; its r and the model's sizes say {size}")
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)
