"""The masked-diffusion families: LLaDA, LLaDA-MoE and Dream, which are a Llama, a Qwen3-MoE and a Qwen2, and MDLM and SEDD
on ddit.py.

Unlike in the public code's loading, remote code is never run, and no tensor is left out or filled in silently.

Sources: the checkpoints' configs, and the model files of LLaDA (Nie et al., 2025), LLaDA-MoE (Zhu et al., 2025), Dream (Ye et
al., 2025), MDLM (Sahoo et al., 2024) and SEDD (Lou et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from draftmill.decoders.backbones.families.causal import rotary_shape
from draftmill.decoders.backbones.families.config import Config, Supported, demand, fitting, whole
from draftmill.decoders.backbones.families.family import Family, rotary_family
from draftmill.decoders.backbones.families.rotary import RotaryShape, Shapes, product_shapes

# ---- LLaDA: a Llama that sees everything, under the names of OLMo ------------------------------------------------------

_LLADA_PREFIX: Final = "model.transformer."
_LLADA_NAMES: Final = {
    "model.embed_tokens": "wte",
    "model.norm": "ln_f",
    "lm_head": "ff_out",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA_LACKS: Final = (
    "include_bias", "include_qkv_bias", "attention_layer_norm", "input_emb_norm", "scale_logits", "alibi",
)  # fmt: skip
_LLADA_BUILT: Final[Supported] = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    **dict.fromkeys(("layer_norm_with_affine", "rope"), (True,)),
    **dict.fromkeys(_LLADA_LACKS, (False,)),
    "bias_for_layer_norm": (False, None),
    "multi_query_attention": (None, False),
    **dict.fromkeys(("clip_qkv", "rope_scaling"), (None,)),
}


def _llada_as_llama(config: Config) -> Config:
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


def llada_name(name: str) -> str:
    """LLaDA's name of a tensor of Llama."""
    part, kind = name.rsplit(".", 1)
    if part in _LLADA_NAMES:
        return f"{_LLADA_PREFIX}{_LLADA_NAMES[part]}.{kind}"
    _, _, layer, inner = part.split(".", 3)
    own = _LLADA_NAMES.get(inner) or inner.rpartition(".")[2]
    return f"{_LLADA_PREFIX}blocks.{layer}.{own}.{kind}"


# ---- LLaDA-MoE: a Qwen3 with experts that sees everything ----------------------------------------------------------------

_LLADA_MOE_BUILT: Final[Supported] = {
    "hidden_act": ("silu",),
    "qk_layernorm": (True,),
    **dict.fromkeys(("clip_qkv", "rope_scaling", "shared_expert_intermediate_size"), (None,)),
    "partial_rotary_factor": (1, None),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    # The public code scales no weights, whatever these say.
    "norm_topk_prob": (False, None),
    "routed_scaling_factor": (1, None),
}


def _llada_moe_as_qwen3(config: Config) -> Config:
    kinds = config["moe_layer_freq"]
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"moe_layer_freq has not one entry for each of the {config['num_hidden_layers']} layers")
    return {
        **config,
        "intermediate_size": config["dense_intermediate_size"],
        "moe_intermediate_size": config["expert_intermediate_size"],
        "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == 0],
    }


# ---- Dream: a Qwen2 that sees everything and still predicts the next token -----------------------------------------------

_DREAM_BUILT: Final[Supported] = {"use_sliding_window": (False,), "use_mrope": (False,)}
# Dream was trained on texts of this length; its config still has the number of its base model.
_DREAM_LENGTH: Final = 2048


def _dream_shape(config: Config) -> RotaryShape:
    shape = rotary_shape(config, name="dream", like="qwen2", built=_DREAM_BUILT)
    return dataclasses.replace(shape, longest=min(_DREAM_LENGTH, shape.max_position_embeddings))


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
    is_bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(f"width {self.hidden_size} does not give {self.num_attention_heads} heads of even width")

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def optional(self) -> set[str]:
        return set()

    def tensors(self) -> Shapes:
        width, condition, vocabulary = self.hidden_size, self.cond_dim, self.vocab_size
        shapes: Shapes = {"vocab_embed.embedding": (vocabulary, width), "output_layer.norm_final.weight": (width,)}
        shapes |= product_shapes("sigma_map.mlp.0", condition, 256)
        shapes |= product_shapes("sigma_map.mlp.2", condition, condition)
        shapes |= product_shapes("output_layer.adaLN_modulation", 2 * width, condition)
        shapes |= product_shapes("output_layer.linear", vocabulary, width)
        for layer in range(self.num_hidden_layers):
            block = f"blocks.{layer}."
            shapes |= {block + "norm1.weight": (width,), block + "norm2.weight": (width,)}
            shapes |= {block + "attn_qkv.weight": (3 * width, width), block + "attn_out.weight": (width, width)}
            shapes |= product_shapes(block + "mlp.0", 4 * width, width)
            shapes |= product_shapes(block + "mlp.2", width, 4 * width)
            shapes |= product_shapes(block + "adaLN_modulation", 6 * width, condition)
        return shapes


_FLAT: Final = {
    "hidden_size": "hidden_dim",
    "cond_dim": "cond_dim",
    "num_hidden_layers": "n_blocks",
    "num_attention_heads": "n_heads",
    "max_length": "model_length",
}
_NESTED: Final = _FLAT | {"hidden_size": "hidden_size", "max_length": "length"}
_GPT2_AND_MASK: Final = 50258
_MDLM_BUILT: Final[Supported] = {
    "parameterization": ("subs",),
    "backbone": ("dit",),
    "diffusion": ("absorbing_state",),
    "time_conditioning": (False, True, None),
    "noise.type": ("loglinear",),
}


def _mdlm_shape(config: Config) -> DDiTShape:
    """Read an MDLM config: the hub's, or a training run's, which has its sizes under `model` and no vocabulary size."""
    nested = config.get("model")
    sizes, names = (nested, _NESTED) if isinstance(nested, Mapping) else (config, _FLAT)
    vocabulary = config if "vocab_size" in config or nested is None else {"vocab_size": _GPT2_AND_MASK}
    takes_sigma, noise = bool(config.get("time_conditioning", False)), config.get("noise")
    # The meaning of sigma matters only to a network that takes it as input.
    kind = noise.get("type") if takes_sigma and isinstance(noise, Mapping) else "loglinear"
    with fitting("mdlm"):
        demand({**config, "noise.type": kind}, _MDLM_BUILT)
        counts = {ours: whole(sizes, theirs) for ours, theirs in names.items()}
        return DDiTShape(**counts, vocab_size=whole(vocabulary, "vocab_size"), takes_sigma=takes_sigma)


def _sedd_shape(config: Config) -> DDiTShape:
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
        counts = {ours: whole(model, theirs) for ours, theirs in _NESTED.items()}
        return DDiTShape(**counts, vocab_size=whole(config, "tokens") + 1, takes_sigma=True)


# ---- the families --------------------------------------------------------------------------------------------------------

_LLADA: Final[dict[str, Any]] = {"theirs": llada_name, "prefix": _LLADA_PREFIX, "mask": 126336, "ends": ("<|eot_id|>",)}
_LLADA_MOE: Final[dict[str, Any]] = {"mask": 156895, "mask_token": "<|mask|>", "ends": ("<|role_end|>",)}
FAMILIES: Final = (
    rotary_family("llada", "masked", "llama", _LLADA_BUILT, _llada_as_llama, **_LLADA),
    rotary_family("llada_moe", "masked", "qwen3_moe", _LLADA_MOE_BUILT, _llada_moe_as_qwen3, **_LLADA_MOE),
    Family("dream", "masked", _dream_shape, prefix="model.", mask=151666, shift=1, ends=("<|im_end|>",)),
    Family(
        "mdlm", "ancestral", _mdlm_shape, theirs=lambda name: f"backbone.{name}", prefix="backbone.", mask_is_last=True
    ),
    Family("sedd", "ancestral", _sedd_shape, mask_is_last=True),
)
