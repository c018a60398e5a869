"""The masked-diffusion families: LLaDA, LLaDA-MoE and Dream, which are a Llama, a Qwen3-MoE and a Qwen2, and MDLM and SEDD
on ddit.py.

Pure tables and checks over a config dict; reads no weights and imports no torch. Differences from the public code's
loading: remote code is never run, and no tensor is ever left out or filled in silently.

Sources: the checkpoints' configs, and the model files of LLaDA (Nie et al., 2025), LLaDA-MoE (Zhu et al., 2025), Dream (Ye et
al., 2025), MDLM (Sahoo et al., 2024) and SEDD (Lou et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftmill.decoders.backbones.families import causal as causal_families
from draftmill.decoders.backbones.families.causal import CausalFamily, Config, Shapes, product_shapes, rotary_family
from draftmill.decoders.backbones.families.config_fields import demand, fitting, numbers

# Defaults of the public checkpoints for fields that config.json lacks.
LLADA_MASK: Final = 126336
LLADA_MOE_MASK: Final = 156895
DREAM_MASK: Final = 151666
# Dream was trained on texts of this length; its config still has the number of its base model.
_DREAM_LENGTH: Final = 2048


# ---- LLaDA: a Llama that sees everything, under the names of OLMo ------------------------------------------------------

LLADA_PREFIX: Final = "model.transformer."
_LLADA_TOP: Final = {
    "wte.weight": "model.embed_tokens.weight",
    "ln_f.weight": "model.norm.weight",
    "ff_out.weight": "lm_head.weight",
}
_LLADA_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LLADA_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "rope": (True,),
    "alibi": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False,),
    "multi_query_attention": (None, False),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
}


def _llada_as_llama(config: Config) -> Config:
    demand(config, _LLADA_BUILT)
    heads = config["n_heads"]
    return {
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("n_kv_heads") or heads,
        "max_position_embeddings": config["max_sequence_length"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "tie_word_embeddings": config.get("weight_tying", False),
    }


def _llama_name(name: str) -> str:
    bare = name.removeprefix(LLADA_PREFIX)
    if bare in _LLADA_TOP:
        return _LLADA_TOP[bare]
    _, layer, part, kind = bare.split(".")
    return f"model.layers.{layer}.{_LLADA_BLOCK[part]}.{kind}"


LLADA: Final = CausalFamily(
    name="llada",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    prefix=LLADA_PREFIX,
    buffers=(),
    convert=lambda weights: {_llama_name(name): tensor for name, tensor in weights.items()},
    translate=_llada_as_llama,
)


def llada_shapes(config: Config) -> Shapes:
    """Name every tensor of a LLaDA checkpoint as it names them, with its shape."""
    llama = causal_families.weight_shapes(LLADA, config)
    names = [
        *_LLADA_TOP,
        *(f"blocks.{layer}.{part}.weight" for layer in range(config["n_layers"]) for part in _LLADA_BLOCK),
    ]
    full = [LLADA_PREFIX + name for name in names]
    return {name: llama[_llama_name(name)] for name in full if _llama_name(name) in llama}


# ---- LLaDA-MoE: a Qwen3 with experts that sees everything, under its own names for the fields ----------------------------

_LLADA_MOE_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "qk_layernorm": (True,),
    "clip_qkv": (None,),
    "partial_rotary_factor": (1, None),
    "rope_scaling": (None,),
    "shared_expert_intermediate_size": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    # The public code scales no weights, whatever these say.
    "norm_topk_prob": (False, None),
    "routed_scaling_factor": (1, None),
}
_LLADA_MOE_FIELDS: Final = {
    "intermediate_size": "dense_intermediate_size",
    "moe_intermediate_size": "expert_intermediate_size",
}
_SAME_FIELDS: Final = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts",
    "num_experts_per_tok", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias",
)  # fmt: skip


def _llada_moe_as_qwen3_moe(config: Config) -> Config:
    demand(config, _LLADA_MOE_BUILT)
    heads, width, kinds = config["num_attention_heads"], config["hidden_size"], config["moe_layer_freq"]
    if width % heads or len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"hidden_size {width} is no multiple of {heads} heads, or moe_layer_freq has not one entry for each of the "
            f"{config['num_hidden_layers']} layers"
        )
    same = {key: config[key] for key in _SAME_FIELDS if config.get(key) is not None}
    return {
        "num_key_value_heads": heads,
        **same,
        **{ours: config[theirs] for ours, theirs in _LLADA_MOE_FIELDS.items()},
        "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == 0],
    }


LLADA_MOE: Final = rotary_family("llada_moe", "Qwen3Moe", translate=_llada_moe_as_qwen3_moe)


# ---- Dream: a Qwen2 that sees everything and still predicts the next token -----------------------------------------------


def _dream_as_qwen2(config: Config) -> Config:
    demand(config, {"use_sliding_window": (False,), "use_mrope": (False,)})
    return {key: value for key, value in config.items() if key not in {"model_type", "architectures", "auto_map"}}


DREAM: Final = rotary_family("dream", "Qwen2", translate=_dream_as_qwen2)


def dream_length(config: Config) -> int:
    """The longest text that the model was trained on."""
    return min(_DREAM_LENGTH, causal_families.max_positions(DREAM, config) or _DREAM_LENGTH)


# ---- MDLM and SEDD: the diffusion transformer of ddit.py -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DDiTShape:
    """The sizes of a diffusion transformer from config.json; the mask is the last of `vocab_size` ids. `takes_sigma` says that
    the noise is an input; a network without it is the same one at sigma = 0."""

    vocab_size: int
    hidden_size: int
    cond_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    max_length: int
    takes_sigma: bool

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"model.path: config.json: width {self.hidden_size} does not give {self.num_attention_heads} heads of even width"
            )


_FLAT: Final = {
    "hidden_size": "hidden_dim",
    "cond_dim": "cond_dim",
    "num_hidden_layers": "n_blocks",
    "num_attention_heads": "n_heads",
    "max_length": "model_length",
}
_NESTED: Final = _FLAT | {"hidden_size": "hidden_size", "max_length": "length"}
_GPT2_AND_MASK: Final = 50258
_MDLM_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "parameterization": ("subs",),
    "backbone": ("dit",),
    "diffusion": ("absorbing_state",),
    "time_conditioning": (False, True, None),
    "noise.type": ("loglinear",),
}


def mdlm_shape(config: Config) -> DDiTShape:
    """Read an MDLM config: the hub's, or a training run's, which has its sizes under `model` and no vocabulary size."""
    nested = config.get("model")
    sizes, names = (nested, _NESTED) if isinstance(nested, Mapping) else (config, _FLAT)
    vocabulary = config if "vocab_size" in config or nested is None else {"vocab_size": _GPT2_AND_MASK}
    takes_sigma, noise = bool(config.get("time_conditioning", False)), config.get("noise")
    # The meaning of sigma matters only to a network that takes it as input.
    kind = noise.get("type") if takes_sigma and isinstance(noise, Mapping) else "loglinear"
    with fitting("mdlm"):
        demand({**config, "noise.type": kind}, _MDLM_BUILT)
    return DDiTShape(
        **numbers(sizes, names, "mdlm"),
        **numbers(vocabulary, {"vocab_size": "vocab_size"}, "mdlm"),
        takes_sigma=takes_sigma,
    )


def sedd_shape(config: Config) -> DDiTShape:
    """Read a SEDD config; only the absorbing graph is supported, whose mask is not in its vocabulary."""
    parts = {name: config.get(name) for name in ("model", "graph", "noise")}
    missing = [name for name, part in parts.items() if not isinstance(part, Mapping)]
    if missing:
        raise ValueError(f"model.path: config.json of family 'sedd' has no sections {', '.join(missing)}")
    model, graph, noise = (dict(part or {}) for part in parts.values())
    kinds = {"graph.type": graph.get("type"), "noise.type": noise.get("type")}
    with fitting("sedd"):
        demand(kinds, {"graph.type": ("absorb",), "noise.type": ("loglinear",)})
        demand(model, {"type": ("ddit",), "scale_by_sigma": (True,)})
    tokens = numbers(config, {"tokens": "tokens"}, "sedd")["tokens"]
    return DDiTShape(**numbers(model, _NESTED, "sedd"), vocab_size=tokens + 1, takes_sigma=True)


_SIGMA_WIDTH: Final = 256


def ddit_shapes(shape: DDiTShape, prefix: str) -> Shapes:
    """Name every tensor of a diffusion transformer, with its shape."""
    width, condition, vocabulary = shape.hidden_size, shape.cond_dim, shape.vocab_size
    shapes: Shapes = {"vocab_embed.embedding": (vocabulary, width), "output_layer.norm_final.weight": (width,)}
    shapes |= product_shapes("sigma_map.mlp.0", condition, _SIGMA_WIDTH)
    shapes |= product_shapes("sigma_map.mlp.2", condition, condition)
    shapes |= product_shapes("output_layer.adaLN_modulation", 2 * width, condition)
    shapes |= product_shapes("output_layer.linear", vocabulary, width)
    for layer in range(shape.num_hidden_layers):
        block = f"blocks.{layer}."
        shapes |= {block + "norm1.weight": (width,), block + "norm2.weight": (width,)}
        shapes |= {block + "attn_qkv.weight": (3 * width, width), block + "attn_out.weight": (width, width)}
        shapes |= product_shapes(block + "mlp.0", 4 * width, width) | product_shapes(block + "mlp.2", width, 4 * width)
        shapes |= product_shapes(block + "adaLN_modulation", 6 * width, condition)
    return {prefix + name: size for name, size in shapes.items()}


def ddit_names(prefix: str, names: Iterable[str]) -> dict[str, str]:
    """Add `prefix` to a checkpoint's names, which lack it for a bare network."""
    names = list(names)
    bare = not any(name.startswith(prefix) for name in names)
    return {name: prefix + name if bare else name for name in names}
