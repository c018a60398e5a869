"""The block-diffusion families: SDAR (a Qwen3), Fast-dLLM v2 (a Qwen2), Nemotron-Labs-Diffusion (a Llama), and LLaDA2.

A model of these families sees every finished block and, in both directions, the current block; the decoder decides what a row
sees. (LLaDA2's released code adds a mask of zeros and ones to the scores, which hides nothing.) Remote code is never run.

Sources: the checkpoints' configs, and the model files of SDAR (Cheng et al., 2025), Fast-dLLM v2 (Wu et al., 2025), LLaDA2.0
(Bie et al., 2025) and 2.1, and Nemotron-Labs-Diffusion (NVIDIA, 2026).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from draftmill.decoders.backbones.families.causal import rotary_shape
from draftmill.decoders.backbones.families.config_fields import Config, demand, fitting, positive, whole, wholes
from draftmill.decoders.backbones.families.masked import Built
from draftmill.decoders.backbones.families.rotary import MixtureShape, RotaryShape

FULL_ATTENTION: Final[Built] = {"use_sliding_window": (False, None)}

# ---- Nemotron-Labs-Diffusion: a Llama (Ministral 3) that is causal, too, and predicts the next token where it is ----------

_NEMOTRON_BUILT: Final[Built] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "tie_word_embeddings": (False,),
}


def nemotron_shape(config: Config) -> RotaryShape:
    """Read a Nemotron-Labs-Diffusion config. Its queries are scaled by their position, by 1 within the length that YaRN starts
    from: longer texts are refused."""
    shape = rotary_shape(config, name="nemotron_labs_diffusion", like="llama", built=_NEMOTRON_BUILT)
    unscaled = shape.rope.get("original_max_position_embeddings") if shape.rope.get("llama_4_scaling_beta") else None
    longest = min(shape.max_position_embeddings, unscaled or shape.max_position_embeddings)
    return dataclasses.replace(shape, longest=longest, is_bounded=True)


def nemotron_name(name: str) -> str:
    """Nemotron's name of a tensor of Llama."""
    return "diffusion_head.weight" if name == "lm_head.weight" else "encoder." + name.removeprefix("model.")


# ---- LLaDA2 --------------------------------------------------------------------------------------------------------------

_SAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_COUNTS: Final = (*_SAME, "num_experts", "num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size")
_LLADA2_BUILT: Final[Built] = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
    "use_qkv_bias": (False,),
    "use_bias": (False,),
    "use_rmsnorm": (True,),
    "using_split_qkv_in_self_attention": (False,),
    "norm_head": (False,),
    "norm_softmax": (False,),
    "norm_topk_prob": (True,),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "tie_word_embeddings": (False,),
    "quantization_config": (None,),
}
_TURNED: Final = 0.5


def llada2_shape(config: Config) -> RotaryShape:
    """Read a LLaDA2 config; ValueError names the first missing, invalid or unsupported field."""
    with fitting("llada2"):
        counts = wholes(config, {key: key for key in _COUNTS})
        heads, width = counts["num_attention_heads"], counts["hidden_size"]
        head_dim = whole(config, "head_dim", width // heads)
        demand(config, _LLADA2_BUILT)
        config = _with_rope_parameters(config)
        same: dict[str, Any] = {key: counts[key] for key in _SAME}
        return RotaryShape(
            **same,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(config, head_dim),
            rms_norm_eps=positive(config, "rms_norm_eps"),
            rope={"rope_theta": positive(config, "rope_theta")},
            windows=(None,) * counts["num_hidden_layers"],
            mixture=_mixture(config, counts),
            dense=frozenset(range(whole(config, "first_k_dense_replace", 0, least=0))),
            head_norms=True,
            is_joined=True,
        )


def _mixture(config: Config, counts: Mapping[str, int]) -> MixtureShape:
    count, chosen = counts["num_experts"], counts["num_experts_per_tok"]
    groups, kept = counts["n_group"], counts["topk_group"]
    each = count // groups
    if count % groups or each < 2 or kept > groups:
        raise ValueError(
            f"{count} experts in n_group = {groups}, of which topk_group = {kept} are kept; allowed: equal groups of at least 2, "
            "no more kept than there are"
        )
    if chosen > kept * each:
        raise ValueError(f"num_experts_per_tok = {chosen}; {kept} groups of {each} have fewer experts")
    inner = counts["moe_intermediate_size"]
    return MixtureShape(
        num_experts=count,
        num_chosen=chosen,
        inner=inner,
        groups=(groups, kept),
        scale=positive(config, "routed_scaling_factor"),
        shared=whole(config, "num_shared_experts", 0, least=0) * inner,
    )


def _with_rope_parameters(config: Config) -> Config:
    """Take `rope_theta` and `partial_rotary_factor` from `rope_parameters` (newer configs); ValueError on a contradiction."""
    rope = config.get("rope_parameters") or {}
    demand({"rope_parameters.rope_type": rope.get("rope_type", "default")}, {"rope_parameters.rope_type": ("default",)})
    inner = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    for key, value in inner.items():
        if config.get(key, value) != value:
            raise ValueError(f"it has {key} = {config[key]!r}, but {value!r} in rope_parameters")
    return {**config, **inner}


def _rotary_dim(config: Config, head_dim: int) -> int:
    """The rotated dimensions of a head; two fields may give them, the public code reads only the factor."""
    turned = int(head_dim * positive(config, "partial_rotary_factor", _TURNED))
    if config.get("rotary_dim") not in {None, turned}:
        raise ValueError(f"it has rotary_dim = {config['rotary_dim']!r}, but partial_rotary_factor makes it {turned}")
    return turned


_LLADA2_NAMES: Final = {
    ".embed_tokens.": ".word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
}


def llada2_name(name: str) -> str:
    """LLaDA2's name of a tensor of Llama."""
    for ours, theirs in _LLADA2_NAMES.items():
        name = name.replace(ours, theirs)
    return name
