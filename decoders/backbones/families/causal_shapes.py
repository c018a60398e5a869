"""The names and shapes of the tensors in transformers' causal models.

tests/decoders/backbones/test_causal_config.py compares with the modules themselves. Legend: I inner
width of a layer's network, Q = heads x head width, K = key heads x head width.
"""

from __future__ import annotations

from typing import Any, Final

Shapes = dict[str, tuple[int, ...]]

# Which attention products have a bias: (queries, keys and values; the output).
_BIASES: Final = {
    "LlamaForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
    "MistralForCausalLM": lambda parsed: (False, False),
    "Qwen2ForCausalLM": lambda parsed: (True, False),
    "Qwen3ForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
    "Qwen3MoeForCausalLM": lambda parsed: (parsed.attention_bias, parsed.attention_bias),
}


def shapes_of(model_class: str, parsed: Any) -> Shapes:
    """Every tensor of a model, the output layer included though it may be tied; `parsed` as read_fields returns it."""
    match model_class:
        case "GPT2LMHeadModel":
            return _gpt2(parsed)
        case "GPTNeoForCausalLM":
            return _gpt_neo(parsed)
    return _rotary(model_class, parsed)


def _rotary(model_class: str, parsed: Any) -> Shapes:
    vocab, width = parsed.vocab_size, parsed.hidden_size
    found: Shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for layer in range(parsed.num_hidden_layers):
        parts = _attention(model_class, parsed) | _inner(model_class, parsed, layer)
        parts |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found | {"lm_head.weight": (vocab, width)}


def _attention(model_class: str, parsed: Any) -> Shapes:
    width = parsed.hidden_size
    head = getattr(parsed, "head_dim", None) or width // parsed.num_attention_heads
    outer, keys = parsed.num_attention_heads * head, parsed.num_key_value_heads * head
    biased, output_biased = _BIASES[model_class](parsed)
    found: Shapes = {}
    for name, rows, columns, bias in (
        ("q_proj", outer, width, biased),
        ("k_proj", keys, width, biased),
        ("v_proj", keys, width, biased),
        ("o_proj", width, outer, output_biased),
    ):
        found[f"self_attn.{name}.weight"] = (rows, columns)
        if bias:
            found[f"self_attn.{name}.bias"] = (rows,)
    if model_class.startswith("Qwen3"):
        found |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return found


def _inner(model_class: str, parsed: Any, layer: int) -> Shapes:
    """The feed-forward network: dense, or the experts of decoders/backbones/moe.py."""
    width = parsed.hidden_size
    is_dense = model_class != "Qwen3MoeForCausalLM" or layer in parsed.mlp_only_layers
    if is_dense or (layer + 1) % parsed.decoder_sparse_step:
        return _gated("mlp", width, parsed.intermediate_size, bias=getattr(parsed, "mlp_bias", False) is True)
    found: Shapes = {"mlp.gate.weight": (parsed.num_experts, width)}
    for expert in range(parsed.num_experts):
        found |= _gated(f"mlp.experts.{expert}", width, parsed.moe_intermediate_size, bias=False)
    return found


def _gated(prefix: str, width: int, inner: int, *, bias: bool) -> Shapes:
    found: Shapes = {}
    for name, rows, columns in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        found[f"{prefix}.{name}.weight"] = (rows, columns)
        if bias:
            found[f"{prefix}.{name}.bias"] = (rows,)
    return found


def _gpt2(parsed: Any) -> Shapes:
    """GPT-2's matrices are [in, out]."""
    width, inner = parsed.n_embd, parsed.n_inner or 4 * parsed.n_embd
    found = _gpt_ends(parsed.vocab_size, parsed.n_positions, width)
    for layer in range(parsed.n_layer):
        prefix = f"transformer.h.{layer}."
        found |= _gpt_norms(prefix, width)
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner),
            ("mlp.c_proj", inner, width),
        ):
            found |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (columns,)}
    return found


def _gpt_neo(parsed: Any) -> Shapes:
    width = parsed.hidden_size
    inner = parsed.intermediate_size or 4 * width
    found = _gpt_ends(parsed.vocab_size, parsed.max_position_embeddings, width)
    for layer in range(parsed.num_layers):
        prefix = f"transformer.h.{layer}."
        found |= _gpt_norms(prefix, width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found[f"{prefix}attn.attention.{name}.weight"] = (width, width)
        found[f"{prefix}attn.attention.out_proj.bias"] = (width,)
        for name, rows, columns in (("c_fc", inner, width), ("c_proj", width, inner)):
            found |= {f"{prefix}mlp.{name}.weight": (rows, columns), f"{prefix}mlp.{name}.bias": (rows,)}
    return found


def _gpt_ends(vocab: int, positions: int, width: int) -> Shapes:
    norm = {f"transformer.ln_f.{name}": (width,) for name in ("weight", "bias")}
    return {
        "transformer.wte.weight": (vocab, width),
        "transformer.wpe.weight": (positions, width),
        "lm_head.weight": (vocab, width),
        **norm,
    }


def _gpt_norms(prefix: str, width: int) -> Shapes:
    return {f"{prefix}{norm}.{name}": (width,) for norm in ("ln_1", "ln_2") for name in ("weight", "bias")}
