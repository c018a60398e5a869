"""The block-diffusion families: SDAR (a Qwen3), Fast-dLLM v2 (a Qwen2), Nemotron-Labs-Diffusion (a Llama), and LLaDA2.

A model of these families sees every finished block and, in both directions, the current block; the decoder decides what a row
sees. (LLaDA2's released code adds a mask of zeros and ones to the scores, which hides nothing.) Remote code is never run.

Sources: the checkpoints' configs, and the model files of SDAR (Cheng et al., 2025), Fast-dLLM v2 (Wu et al., 2025), LLaDA2.0
(Bie et al., 2025) and 2.1, and Nemotron-Labs-Diffusion (NVIDIA, 2026).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from draftmill.decoders.backbones.families.causal import rotary_shape
from draftmill.decoders.backbones.families.config import Config, Supported, demand, fitting, positive, whole
from draftmill.decoders.backbones.families.family import Family, rotary_family
from draftmill.decoders.backbones.families.rotary import MixtureShape, RotaryShape

# ---- Nemotron-Labs-Diffusion: a Llama (Ministral 3) that is causal, too, and predicts the next token where it is ----------

_NEMOTRON_BUILT: Final[Supported] = {
    "hidden_act": ("silu",),
    "sliding_window": (None,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), (False,)),
}


def _nemotron_shape(config: Config) -> RotaryShape:
    """Read a Nemotron-Labs-Diffusion config. Its queries are scaled by their position, by 1 within the length that YaRN starts
    from: longer texts are refused."""
    shape = rotary_shape(config, name="nemotron_labs_diffusion", like="llama", built=_NEMOTRON_BUILT)
    unscaled = shape.rope.get("original_max_position_embeddings") if shape.rope.get("llama_4_scaling_beta") else None
    longest = min(shape.max_position_embeddings, unscaled or shape.max_position_embeddings)
    return dataclasses.replace(shape, longest=longest, is_bounded=True)


def _nemotron_name(name: str) -> str:
    return "diffusion_head.weight" if name == "lm_head.weight" else "encoder." + name.removeprefix("model.")


# ---- LLaDA2 --------------------------------------------------------------------------------------------------------------

_SIZES: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_LLADA2_HAS: Final = ("use_qk_norm", "use_rmsnorm", "norm_topk_prob", "moe_router_enable_expert_bias")
_LLADA2_LACKS: Final = (
    "use_qkv_bias", "use_bias", "using_split_qkv_in_self_attention", "norm_head", "norm_softmax", "tie_word_embeddings",
)  # fmt: skip
_LLADA2_BUILT: Final[Supported] = {
    "hidden_act": ("silu",),
    "score_function": ("sigmoid",),
    "use_sliding_window": (False, None),
    **dict.fromkeys(("rope_scaling", "quantization_config"), (None,)),
    **dict.fromkeys(_LLADA2_HAS, (True,)),
    **dict.fromkeys(_LLADA2_LACKS, (False,)),
}


def llada2_shape(config: Config) -> RotaryShape:
    """Read a LLaDA2 config; ValueError names the first missing, invalid or unsupported field."""
    with fitting("llada2"):
        sizes: dict[str, Any] = {key: whole(config, key) for key in _SIZES}
        demand(config, _LLADA2_BUILT)
        config = _with_rope_parameters(config)
        head_dim = whole(config, "head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        rotary_dim = int(head_dim * positive(config, "partial_rotary_factor", 0.5))
        if config.get("rotary_dim") not in {None, rotary_dim}:  # which the public code does not read
            raise ValueError(
                f"it has rotary_dim = {config['rotary_dim']!r}, but partial_rotary_factor makes it {rotary_dim}"
            )
        return RotaryShape(
            **sizes,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rms_norm_eps=positive(config, "rms_norm_eps"),
            rope={"rope_theta": positive(config, "rope_theta")},
            windows=(None,) * sizes["num_hidden_layers"],
            mixture=_mixture(config),
            dense=frozenset(range(whole(config, "first_k_dense_replace", 0, least=0))),
            head_norms=True,
            is_joined=True,
        )


def _mixture(config: Config) -> MixtureShape:
    count, chosen, inner = (
        whole(config, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    groups, kept = whole(config, "n_group"), whole(config, "topk_group")
    each = count // groups
    if count % groups or each < 2 or kept > groups:
        raise ValueError(
            f"{count} experts in n_group = {groups}, of which topk_group = {kept} are kept; allowed: equal groups of at least 2, "
            "no more kept than there are"
        )
    if chosen > kept * each:
        raise ValueError(f"num_experts_per_tok = {chosen}; {kept} groups of {each} have fewer experts")
    scale, shared = positive(config, "routed_scaling_factor"), whole(config, "num_shared_experts", 0, least=0) * inner
    return MixtureShape(
        num_experts=count, num_chosen=chosen, inner=inner, groups=(groups, kept), scale=scale, shared=shared
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


_LLADA2_NAMES: Final = {
    ".embed_tokens.": ".word_embeddings.",
    ".self_attn.qkv_proj.": ".attention.query_key_value.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
}


def _llada2_name(name: str) -> str:
    for ours, theirs in _LLADA2_NAMES.items():
        name = name.replace(ours, theirs)
    return name


# ---- the families --------------------------------------------------------------------------------------------------------

_FULL_ATTENTION: Final[Supported] = {"use_sliding_window": (False, None)}
_QWEN3: Final[dict[str, Any]] = {"mask": 151669, "mask_token": "<|MASK|>", "ends": ("<|im_end|>",)}
_SDAR: Final[dict[str, Any]] = {**_QWEN3, "block": 4}
_FAST_DLLM: Final[dict[str, Any]] = {"mask": 151665, "mask_token": "|<MASK>|", "block": 32, "ends": ("<|im_end|>",)}
_LLADA2: Final[dict[str, Any]] = {"mask": 156895, "mask_token": "<|mask|>", "block": 32, "ends": ("<|role_end|>",)}
_NEMOTRON: Final[dict[str, Any]] = {"mask": 100, "block": 32, "left_shift": 1, "prompt_block": True}
FAMILIES: Final = (
    rotary_family("sdar", "blocks", "qwen3", _FULL_ATTENTION, **_SDAR),
    # I-DLM (Yu et al., 2026): SDAR's layout, trained to be causal, masks too. No config says so: the user does.
    rotary_family("idlm", "causal", "qwen3", _FULL_ATTENTION, shift=1, **_QWEN3),
    rotary_family("sdar_moe", "blocks", "qwen3_moe", {**_FULL_ATTENTION, "hidden_act": ("silu",)}, **_SDAR),
    rotary_family("fast_dllm_v2", "blocks", "qwen2", _FULL_ATTENTION, shift=1, **_FAST_DLLM),
    Family("llada2", "blocks", llada2_shape, theirs=_llada2_name, **_LLADA2),
    Family("nemotron_labs_diffusion", "blocks", _nemotron_shape, theirs=_nemotron_name, prefix="encoder.", **_NEMOTRON),
)
