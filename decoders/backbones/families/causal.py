"""Reads config.json of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, and of families that are like one of them (network.py).

Only fields that decide a number or a tensor are read. Defaults are those of transformers' config classes, from which
config.json may leave fields out; sizes have none. Compared with transformers in tests/decoders/backbones/test_causal_config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from draftmill.decoders.backbones.families.config import Config, Supported, demand, fitting, flag, positive, whole
from draftmill.decoders.backbones.families.rotary import MixtureShape, RotaryShape

Like = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
_LONGEST: Final = {"llama": 2048, "mistral": 131072}
_WINDOW: Final = 4096
# Frequencies that follow the longest sequence of a batch would make a sample depend on its neighbours.
_ROPE_NEEDS: Final = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OF_YARN: Final = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def rotary_shape(
    config: Config,
    *,
    name: str,
    like: Like,
    built: Supported | None = None,
    translate: Callable[[Config], Config] = lambda config: config,
) -> RotaryShape:
    """The sizes of a model of family `name`, whose fields are those of family `like`, after `translate` where they have other
    names. `built` has the supported values of further fields, as `demand` takes them. ValueError if config.json is invalid, or
    asks for what is not supported."""
    with fitting(name, TypeError, KeyError, AttributeError, ArithmeticError):
        demand(config, built or {})
        config = translate(config)
        width, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
        heads = whole(config, "num_attention_heads")
        key_heads = whole(config, "num_key_value_heads", heads)
        if config.get("head_dim") is None and like != "qwen3" and width % heads:
            raise ValueError(f"hidden_size {width} is not a multiple of {heads} heads")
        head_dim = whole(config, "head_dim", 128 if like == "qwen3" else width // heads)
        asked = flag(config, "attention_bias")
        mixture, dense = _mixture(config, layers) if like == "qwen3_moe" else (None, frozenset[int]())
        return RotaryShape(
            vocab_size=whole(config, "vocab_size"),
            hidden_size=width,
            intermediate_size=whole(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            rotary_dim=head_dim,
            rms_norm_eps=positive(config, "rms_norm_eps", 1e-6),
            rope=_rope(config),
            max_position_embeddings=whole(config, "max_position_embeddings", _LONGEST.get(like, 32768)),
            windows=_windows(config, like, layers),
            hidden_act=config.get("hidden_act", "silu"),
            tied=flag(config, "tie_word_embeddings"),
            mixture=mixture,
            dense=dense,
            qkv_bias={"mistral": False, "qwen2": True}.get(like, asked),
            output_bias=asked and like not in {"mistral", "qwen2"},
            inner_bias=like == "llama" and flag(config, "mlp_bias"),
            head_norms=like in {"qwen3", "qwen3_moe"},
        )


def _rope(config: Config) -> dict[str, Any]:
    """The rotary settings as one dict, for config.json of any version of transformers."""
    held = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(held, dict) or any(isinstance(value, dict) for value in held.values()):
        raise ValueError("rope_parameters must be an object of plain values; per-layer rotations are not supported")
    rope = {"rope_type": held.get("type", "default"), "rope_theta": config.get("rope_theta", 10_000.0), **held}
    kind, turned = rope["rope_type"], rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind not in _ROPE_NEEDS:
        raise ValueError(
            f"rope type {kind!r}; supported: {', '.join(_ROPE_NEEDS)} (one whose frequencies follow the longest sequence "
            "of a batch would make samples depend on each other)"
        )
    given = (key for key in _OF_YARN if rope.get(key) is not None and rope[key] != 0)
    for key in ("rope_theta", *_ROPE_NEEDS[kind], *given):
        positive(rope, key)
    # The default type rotates whole heads and ignores this field; the other types would give too few angles.
    if kind != "default" and turned not in {None, 1.0}:
        raise ValueError(
            f"partial_rotary_factor = {turned!r} with rope type {kind!r}; supported: 1 (whole heads are rotated)"
        )
    return rope


def _windows(config: Config, like: Like, layers: int) -> tuple[int | None, ...]:
    """How many positions back each layer sees, its own included; None for all."""
    if like in {"llama", "qwen3_moe"}:
        return (None,) * layers
    has_window = like == "mistral" or flag(config, "use_sliding_window")
    has_window = has_window and config.get("sliding_window", _WINDOW) is not None
    window = whole(config, "sliding_window", _WINDOW) if has_window else None
    if like == "mistral":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = whole(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types has no entry for each of the {layers} layers")
    unknown = sorted({str(kind) for kind in kinds} - {"attention", "full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; supported: full_attention, sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(
            "layer_types holds sliding_attention, but sliding_window is null or use_sliding_window is false"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mixture(config: Config, layers: int) -> tuple[MixtureShape, frozenset[int]]:
    """The experts, and the layers that have none."""
    count = whole(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    chosen = whole(config, "num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok = {chosen} of {count} experts; allowed: 1 to all")
    step, dense = whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    inner, normalise = whole(config, "moe_intermediate_size"), flag(config, "norm_topk_prob")
    mixture = MixtureShape(num_experts=count, num_chosen=chosen, inner=inner, normalise=normalise)
    return mixture, frozenset(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
