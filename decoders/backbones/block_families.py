"""The block-diffusion families: SDAR, which runs on transformers' Qwen3.

Pure tables and checks over a config dict; reads no weights and imports no torch. A model of these families sees every finished
block and, in both directions, the block that it fills; what a row sees is the decoder's business. Their remote code is never
run.

Sources: the checkpoints' configs and model files (SDAR: Cheng et al., 2025).
"""

from __future__ import annotations

from typing import Final

from decoders.backbones.causal_families import CausalFamily, Config
from decoders.backbones.masked_families import demand, numbers

DECODERS: Final = ("block_diffusion", "s2d2")
"""The decoders that run on these families."""
MASK_TOKEN: Final = "<|MASK|>"
"""What SDAR's tokenizers call the mask."""
MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""

# What the public checkpoints use where neither config.json nor the tokenizer says: the id of the mask, the block that the
# model was trained with.
_SDAR_MASK, _SDAR_BLOCK = 151669, 4

_ROTARY_BUFFERS: Final = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")
# Fields that would send transformers to other code, or say how a training run computed what is the same network.
_NOT_OURS: Final = {"model_type", "architectures", "auto_map", "attn_implementation"}


def _number(config: Config, keys: tuple[str, ...], default: int) -> int:
    """Return the first of `keys` that config.json has as a whole number >= 1, else `default`."""
    found = next((key for key in keys if config.get(key) is not None), None)
    return default if found is None else numbers(config, {found: found}, str(config.get("model_type")))[found]


def _full_attention(config: Config) -> Config:
    demand(config, {"use_sliding_window": (False, None)})
    return {key: value for key, value in config.items() if key not in _NOT_OURS}


# ---- SDAR: a Qwen3 that sees its block in both directions ------------------------------------------------------------

SDAR: Final = CausalFamily(
    name="sdar",
    config_class="Qwen3Config",
    model_class="Qwen3ForCausalLM",
    prefix="model.",
    buffers=_ROTARY_BUFFERS,
    translate=_full_attention,
)


def _mask_id(config: Config, default: int) -> int:
    return next((config[key] for key in MASK_KEYS if config.get(key) is not None), default)


def sdar_mask(config: Config) -> int:
    """The id of the mask token, the public checkpoints' where config.json doesn't say."""
    return _mask_id(config, _SDAR_MASK)


def sdar_block(config: Config) -> int:
    """How many positions the blocks had that the model was trained with."""
    return _number(config, ("block_size", "block_length"), _SDAR_BLOCK)
