"""LLaDA's, LLaDA2's and DDiT's networks once more, as short as they go: one text, no cache, no batch, experts row by row.

Written from what is known of the public models, not from the code under test. `weights` are a checkpoint's tensors by name.
Legend: L positions, D width, H heads, d head width.
"""

import math

import torch
from torch.nn import functional


def _norm(rows, weight, epsilon):
    return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)


def _turn(rows_HLd, theta, width):
    angle = torch.arange(rows_HLd.shape[1])[:, None] / theta ** (torch.arange(0, width, 2).double() / width)
    cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    turned, still = rows_HLd[..., :width], rows_HLd[..., width:]
    partner = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
    return torch.cat([turned * cosine + partner * sine, still], dim=-1)


def _attend(query, key, value):
    """All positions see each other; [L, H d]."""
    key, value = (rows.repeat_interleave(len(query) // len(rows), 0) for rows in (key, value))
    mixed = (query @ key.transpose(1, 2) / query.shape[2] ** 0.5).softmax(-1) @ value
    return mixed.transpose(0, 1).flatten(1)


def _heads(rows_LD, count):
    return rows_LD.unflatten(1, (count, -1)).transpose(0, 1)


def _gated(rows, gate, up, down):
    return (functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def llada(weights, config, tokens):
    """Logits [L, V]."""
    w = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in weights.items()}
    rows, epsilon = w["wte.weight"][tokens], config["rms_norm_eps"]
    heads, key_heads = config["n_heads"], config["n_kv_heads"] or config["n_heads"]
    for layer in range(config["n_layers"]):
        b = {name.removeprefix(f"blocks.{layer}."): tensor for name, tensor in w.items()}
        inner = _norm(rows, b["attn_norm.weight"], epsilon)
        query, key, value = (
            _heads(inner @ b[name + "_proj.weight"].T, count)
            for name, count in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        query, key = (_turn(part, config["rope_theta"], part.shape[2]) for part in (query, key))
        rows = rows + _attend(query, key, value) @ b["attn_out.weight"].T
        inner = _norm(rows, b["ff_norm.weight"], epsilon)
        down = w[f"blocks.{layer}.ff_out.weight"]
        rows = rows + _gated(inner, b["ff_proj.weight"], b["up_proj.weight"], down)
    head = w["wte.weight"] if config["weight_tying"] else w["ff_out.weight"]
    return _norm(rows, w["ln_f.weight"], epsilon) @ head.T


def llada2(weights, config, tokens):
    """Logits [L, V]."""
    w = {name.removeprefix("model."): tensor.double() for name, tensor in weights.items()}
    rows, epsilon, head_dim = w["word_embeddings.weight"][tokens], config["rms_norm_eps"], config["head_dim"]
    counts = [config["num_attention_heads"]] + 2 * [config["num_key_value_heads"]]
    theta, turned = config["rope_theta"], int(head_dim * config["partial_rotary_factor"])
    for layer in range(config["num_hidden_layers"]):
        b = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in w.items()}
        inner = _norm(rows, b["input_layernorm.weight"], epsilon)
        query, key, value = _heads(inner @ b["attention.query_key_value.weight"].T, sum(counts)).split(counts)
        query = _turn(_norm(query, b["attention.query_layernorm.weight"], epsilon), theta, turned)
        key = _turn(_norm(key, b["attention.key_layernorm.weight"], epsilon), theta, turned)
        rows = rows + _attend(query, key, value) @ b["attention.dense.weight"].T
        inner = _norm(rows, b["post_attention_layernorm.weight"], epsilon)
        if layer < config["first_k_dense_replace"]:
            rows = rows + _mlp(inner, b, "mlp.")
        else:
            rows = rows + torch.stack([_mix(row, b, config) for row in inner])
    return _norm(rows, w["norm.weight"], epsilon) @ w["lm_head.weight"].T


def _mlp(rows, weights, prefix):
    return _gated(rows, *(weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")))


def _mix(row_D, weights, config):
    scores = torch.sigmoid(weights["mlp.gate.weight"] @ row_D)
    biased = (scores + weights["mlp.gate.expert_bias"]).tolist()
    size = config["num_experts"] // config["n_group"]
    groups = [range(first, first + size) for first in range(0, config["num_experts"], size)]
    groups.sort(key=lambda group: -sum(sorted(biased[expert] for expert in group)[-2:]))
    left = [expert for group in groups[: config["topk_group"]] for expert in group]
    chosen = sorted(left, key=lambda expert: -biased[expert])[: config["num_experts_per_tok"]]
    shares = scores[chosen] / scores[chosen].sum() if len(chosen) > 1 else scores[chosen]
    parts = [
        share * _mlp(row_D, weights, f"mlp.experts.{expert}.") for share, expert in zip(shares, chosen, strict=True)
    ]
    mixed = config["routed_scaling_factor"] * sum(parts)
    return mixed + _mlp(row_D, weights, "mlp.shared_experts.") if config["num_shared_experts"] else mixed


def ddit(weights, config, tokens, sigma):
    """Logits [L, V] at one sigma; `config` as the hub's MDLM writes it."""
    w = {name.removeprefix("backbone."): tensor.double() for name, tensor in weights.items()}

    def linear(rows, name):
        return functional.linear(rows, w[name + ".weight"], w.get(name + ".bias"))

    def modulated(rows, norm, shift, scale):
        return functional.layer_norm(rows, rows.shape[1:]) * w[norm + ".weight"] * (1 + scale) + shift

    angle = sigma * torch.exp(-math.log(10000) / 128 * torch.arange(128).double())
    inner = functional.silu(linear(torch.cat([angle.cos(), angle.sin()]), "sigma_map.mlp.0"))
    condition = functional.silu(linear(inner, "sigma_map.mlp.2"))
    rows = w["vocab_embed.embedding"][tokens]
    for layer in range(config["n_blocks"]):
        block = f"blocks.{layer}."
        parts = linear(condition, block + "adaLN_modulation").chunk(6)
        joined = linear(modulated(rows, block + "norm1", *parts[:2]), block + "attn_qkv")
        query, key, value = (_heads(part, config["n_heads"]) for part in joined.chunk(3, dim=1))
        query, key = (_turn(part, 10000.0, part.shape[2]) for part in (query, key))
        rows = rows + parts[2] * linear(_attend(query, key, value), block + "attn_out")
        inner = linear(modulated(rows, block + "norm2", *parts[3:5]), block + "mlp.0")
        rows = rows + parts[5] * linear(functional.gelu(inner, approximate="tanh"), block + "mlp.2")
    parts = linear(condition, "output_layer.adaLN_modulation").chunk(2)
    return linear(modulated(rows, "output_layer.norm_final", *parts), "output_layer.linear")
