"""Models of known shapes with random weights, made on the device itself: speed depends on shapes, not on what a model says.

Knows nothing of tables or of other software.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.families.table import describe, find_family
from draftmill.decoders.backbones.families.xlnet import xlnet_shape
from draftmill.decoders.backbones.transformer import TransformerBackbone
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.base import ModelInfo

LLAMA_8B: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False,
}  # fmt: skip
LLADA_8B: Final[dict[str, Any]] = {
    "model_type": "llada", "vocab_size": 126464, "embedding_size": 126464, "d_model": 4096, "mlp_hidden_size": 12288,
    "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "max_sequence_length": 4096, "rope_theta": 500000.0,
    "weight_tying": False, "mask_token_id": 126336, "rms_norm_eps": 1e-5, "block_type": "llama", "layer_norm_type": "rms",
    "activation_type": "silu", "rope": True, "include_bias": False, "include_qkv_bias": False, "eos_token_id": 126081,
}  # fmt: skip
XLNET_110M: Final[dict[str, Any]] = {
    "model_type": "xlnet", "vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072,
}  # fmt: skip
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "vocab_size": 211, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "llada": {
        "vocab_size": 211, "embedding_size": 211, "d_model": 32, "mlp_hidden_size": 48, "n_layers": 2, "n_heads": 4,
        "n_kv_heads": 4, "max_sequence_length": 256, "mask_token_id": 200, "eos_token_id": 201,
    },
    "xlnet": {"vocab_size": 211, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
}  # fmt: skip
# Small enough that no sum overflows in half precision, large enough that tokens differ.
_SPREAD: Final = 0.02


@dataclass(frozen=True, slots=True)
class Made:
    """A model, what is known of it, and the bytes of its weights."""

    backbone: Model
    info: ModelInfo
    num_bytes: int


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same kind of model, of a size for a CPU."""
    return {**config, **_SMALL[config["model_type"]]}


def make_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Made:
    """Make a model with random weights: scales are one, everything else is normal with a small spread."""
    family = find_family(config, "auto")
    family.check(config)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in family.weight_shapes(config).items():
        if "norm" in name and len(shape) == 1:
            weights[name] = torch.full(shape, float("bias" not in name), dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
    backbone: Any
    if family.rows_are_tokens:
        full = family.full_names(weights)
        named = {full[name]: tensor for name, tensor in weights.items()}
        assert family.causal is not None, "only models that run on transformers' classes are made here"
        backbone = TransformerBackbone(family.causal, config, named, dtype=dtype, device=device)
    else:
        backbone = XLNetBackbone(xlnet_shape(config), weights, dtype=dtype, device=device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return Made(cast(Model, backbone), describe(family, config, mask_id=None, max_length=None), num_bytes)
