"""The block-diffusion families: SDAR and Fast-dLLM v2, which run on transformers' Qwen3 and Qwen2.

Pure tables and checks over a config dict; reads no weights and imports no torch. A model of these families sees every finished
block and, in both directions, the block that it fills; what a row sees is the decoder's business. Their remote code is never
run.

Sources: the checkpoints' configs and model files of SDAR (Cheng et al., 2025) and Fast-dLLM v2 (Wu et al., 2025).
"""

from __future__ import annotations

from typing import Final

from decoders.backbones.causal_families import CausalFamily, Config
from decoders.backbones.masked_families import demand, numbers

DECODERS: Final = ("block_diffusion", "s2d2")
"""The decoders that run on these families."""
MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""
SDAR_MASK_TOKEN: Final = "<|MASK|>"
FAST_DLLM_MASK_TOKEN: Final = "|<MASK>|"

# What the public checkpoints use where neither config.json nor the tokenizer says: the id of the mask, the block that the
# model was trained with.
_SDAR_MASK, _SDAR_BLOCK = 151669, 4
_FAST_DLLM_MASK, _FAST_DLLM_BLOCK = 151665, 32

_ROTARY_BUFFERS: Final = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")
# Fields that name other code, or the kernels of a training run.
_NOT_OURS: Final = {"model_type", "architectures", "auto_map", "attn_implementation"}


def _mask_id(config: Config, default: int) -> int:
    key = next((key for key in MASK_KEYS if config.get(key) is not None), None)
    if key is None:
        return default
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
    return value


def _block(config: Config, keys: tuple[str, ...], default: int) -> int:
    key = next((key for key in keys if config.get(key) is not None), None)
    return default if key is None else numbers(config, {key: key}, str(config.get("model_type")))[key]


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


def sdar_mask(config: Config) -> int:
    """The id of the mask token, the public checkpoints' where config.json doesn't say."""
    return _mask_id(config, _SDAR_MASK)


def sdar_block(config: Config) -> int:
    """How many positions the blocks had that the model was trained with; config.json says it where it isn't 4."""
    return _block(config, ("block_size", "block_length"), _SDAR_BLOCK)


# ---- Fast-dLLM v2: a Qwen2 that sees its block in both directions and still predicts the next token ---------------------

FAST_DLLM_V2: Final = CausalFamily(
    name="fast_dllm_v2",
    config_class="Qwen2Config",
    model_class="Qwen2ForCausalLM",
    prefix="model.",
    buffers=_ROTARY_BUFFERS,
    translate=_full_attention,
)


def fast_dllm_mask(config: Config) -> int:
    """The id of the mask token, the public checkpoints' where config.json doesn't say, which theirs don't."""
    return _mask_id(config, _FAST_DLLM_MASK)


def fast_dllm_block(config: Config) -> int:
    """How many positions the blocks had that the model was trained with."""
    return _block(config, ("bd_size", "block_size"), _FAST_DLLM_BLOCK)
