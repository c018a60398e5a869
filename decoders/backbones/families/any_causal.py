"""Causal models of transformers without an entry in the table: what is known of them before their weights are read.

What a layer's attention needs (heads, widths, a window, a soft cap, sinks) is not looked up by the names of a family's fields.
The model is built from config.json without memory, on the meta device, and run once; what it asks of transformers' attention
interface is noted. A layer that mixes positions in another way (state spaces, linear attention, convolutions) does not ask there,
and has no place in a slot cache: such models are refused before anything is written.

transformers is imported inside of functions, since it takes seconds. Its own classes alone are used, never remote code.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata
from typing import Any, Final

from draftmill.decoders.backbones.families.config import Config, fitting
from draftmill.decoders.backbones.families.family import Family
from draftmill.decoders.backbones.families.rotary import Shapes

TESTED: Final = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "helium", "mimo_v2_flash", "minicpm3", "ministral3", "mixtral", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
TESTED_WITH: Final = "5.23.0"
"""The types of which tiny random models were compared with transformers' own texts, and its version."""

PROBE: Final = "draftmill_probe"
_HOW_TO_RUN: Final = (
    "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation",
    "quantization_config", "compression_config", "reorder_and_upcast_attn",
)  # fmt: skip
# Rotary types whose frequencies change in texts longer than those of the training, which are refused.
_LONGER_ROPE: Final = {"dynamic", "longrope"}
_OLD_BUFFERS: Final = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.(attention\.)?bias$")
_LAYERS: Final = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class CausalFacts:
    """What is known of a model without its weights. `shapes` are its tensors by their names in a checkpoint, without tied ones,
    which are `tied`. A layer may have fewer key heads than `num_key_value_heads`, and narrower heads than `head_dim`. `is_plain`
    says that no layer has a soft cap or sinks. Texts of more than `max_length` tokens are refused if `is_bounded`."""

    model_class: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    is_plain: bool
    max_length: int | None
    is_bounded: bool
    shapes: Shapes
    tied: frozenset[str]

    def tensors(self) -> Shapes:
        """Every tensor that a checkpoint must have by its name there, with its shape."""
        return self.shapes

    def optional(self) -> set[str]:
        return set(self.tied)


def version() -> str:
    """The version of transformers, whose models these are."""
    return metadata.version("transformers")


def family(name: str) -> Family | None:
    """The causal models of transformers with this `model_type`; None if there are none."""
    if name not in _classes():
        return None
    shape, is_left = partial(facts, name), partial(is_unread, name)
    return Family(name, "causal", shape, prefix=f"{_class(name).base_model_prefix}.", is_unread=is_left, shift=1)


@lru_cache
def _classes() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, _classes()[name])


def is_unread(name: str, tensor: str) -> bool:
    """Whether a tensor without a module may be left unread: one that only training uses, or a buffer of older versions."""
    patterns = [*(_class(name)._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS]
    return any(re.search(pattern, tensor) for pattern in patterns)


def parse(name: str, config: Config) -> Any:
    """config.json as transformers' config object; ValueError if it is invalid."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {key: value for key, value in config.items() if key not in _HOW_TO_RUN}
    with fitting(name, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError):
        return CONFIG_MAPPING[name].from_dict(fields)


def facts(name: str, config: Config) -> CausalFacts:
    """What is known of a model of this `model_type`; ValueError, in one line, if it can't run on the slot cache."""
    return _facts(name, json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=8)
def _facts(name: str, config: str) -> CausalFacts:
    parsed = parse(name, json.loads(config))
    with fitting(name):
        _check(parsed)
        is_pinned = not _LONGER_ROPE.isdisjoint(_rope_types(parsed))
        calls, shapes, tied, num_tables = _probe(name, parsed)
        layers = [call["layer"] for call in calls]
        if layers != list(range(parsed.num_hidden_layers)):
            raise ValueError(
                f"{sum(layers.count(index) == 1 for index in set(layers))} of its {parsed.num_hidden_layers} layers attend once, "
                "through transformers' attention interface; supported: all layers (no state spaces, no linear or differential "
                "attention)"
            )
        heads, keys = {call["heads"] for call in calls}, max(call["keys"] for call in calls)
        if len(heads) > 1 or any(keys % call["keys"] for call in calls):
            raise ValueError(
                "its layers have unequal numbers of heads; supported: one number, and key heads that divide it"
            )
        windows = tuple(call["window"] for call in calls)
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"its layers have windows of {windows} positions; supported: numbers >= 1")
    longest = getattr(parsed, "max_position_embeddings", None)
    if is_pinned:
        trained = parsed.rope_parameters.get("original_max_position_embeddings")
        longest = getattr(parsed, "original_max_position_embeddings", None) or trained or longest
    return CausalFacts(
        model_class=_classes()[name],
        vocab_size=int(parsed.vocab_size),
        hidden_size=int(parsed.hidden_size),
        num_hidden_layers=len(calls),
        num_attention_heads=heads.pop(),
        num_key_value_heads=keys,
        head_dim=max(call["width"] for call in calls),
        windows=windows,
        is_plain=all(call["plain"] for call in calls),
        max_length=longest,
        is_bounded=is_pinned or num_tables > 1,
        shapes=shapes,
        tied=tied,
    )


def _check(parsed: Any) -> None:
    if parsed.is_encoder_decoder or getattr(parsed, "add_cross_attention", False):
        raise ValueError("it has an encoder; supported: decoders alone")
    inner = [key for key in parsed.sub_configs if getattr(parsed, key, None) is not None]
    if inner:
        raise ValueError(f"it has {inner[0]}, the config of a model inside of it; supported: models of text alone")
    unknown = sorted(set(getattr(parsed, "layer_types", None) or ()) - _LAYERS)
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; supported: {', '.join(sorted(_LAYERS))}")


def _rope_types(parsed: Any) -> set[str]:
    """The rotary types of a config, which may have one for each kind of layer."""
    rope = getattr(parsed, "rope_parameters", None) or {}
    each = rope.values() if any(isinstance(value, dict) for value in rope.values()) else [rope]
    return {str(one.get("rope_type", "default")) for one in each if isinstance(one, dict)}


def pin_rotations(model: Any) -> Any:
    """Keep the rotary frequencies of short texts whatever the length of a batch: texts longer than the training's are refused."""
    for part in model.modules():
        if isinstance(kind := getattr(part, "rope_type", None), str) and kind in _LONGER_ROPE:
            part.rope_type = "default"
    return model


def _probe(name: str, parsed: Any) -> tuple[list[dict[str, Any]], Shapes, frozenset[str], int]:
    """Run the model on the meta device: its calls of attention, a checkpoint's tensors, tied ones, the number of embeddings."""
    import torch
    from transformers import AttentionInterface
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from draftmill.decoders.backbones.any_causal import use_interface

    calls: list[dict[str, Any]] = []

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any) -> Any:
        window = more.get("sliding_window")
        if getattr(module, "is_causal", True) is False:
            raise TypeError("its attention sees texts in both directions")
        if more.get("layout") != PROBE:
            raise TypeError("it does not hand keyword arguments to its attention")
        call = {
            "layer": int(module.layer_idx),
            "heads": query.shape[1],
            "keys": key.shape[1],
            "width": max(key.shape[3], value.shape[3]),
            "window": None if window is None else int(window),
            "plain": more.get("softcap") is None and more.get("s_aux") is None,
        }
        calls.append(call)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(PROBE, attention)
    ALL_EXPERTS_FUNCTIONS.register(PROBE, lambda module, hidden, index, weight: hidden)
    try:
        with torch.no_grad(), torch.device("meta"):
            model = pin_rotations(_class(name)(parsed)).eval()
            use_interface(model)
            parsed._attn_implementation = parsed._experts_implementation = PROBE
            rows = {"input_ids": torch.zeros(1, 1).long(), "position_ids": torch.zeros(1, 1).long()}
            if model.get_decoder() is model:
                raise TypeError("its layers and its output layer are one module")
            model.get_decoder()(**rows, attention_mask=torch.zeros(1, 1, 1, 1), use_cache=False, layout=PROBE)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if PROBE in reason:
            reason = "its attention does not go through transformers' interface"
        raise ValueError(f"its network does not run on rows of tokens: {reason}") from error
    tied = frozenset(model.all_tied_weights_keys or ())
    held = revert_weight_conversion(model, model.state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items() if name not in tied}
    tables = sum(isinstance(part, torch.nn.Embedding) for part in model.get_decoder().modules())
    return calls, shapes, tied, tables
