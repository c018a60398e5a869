"""GGUF files as llama.cpp's converter writes them, of tiny models and vocabularies that tests make."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The 256 tokens of a byte-level vocabulary, in an order of its own."""

WORDS = {
    "kind": "gpt2",
    "tokens": [*BYTES, "<|begin|>", "<|end|>", "<|turn|>", "12", "ab", "abc"],
    "types": [1] * 256 + [3] * 3 + [1] * 3,
    "merges": ["1 2", "a b", "ab c"],
}
"""A byte-level vocabulary with three special tokens and three merged ones: 262 ids."""


def write_gguf(
    path: Path,
    model,
    *,
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    vocabulary: dict | None = None,
    keys: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a model of transformers (Llama, Qwen2, Qwen3, GPT-2); `keys` and `tensors` are added, or replace others.

    `vocabulary` has the tokens' `kind`, `tokens`, `types` and `merges`. A key of the architecture begins with a dot.
    """
    config = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(path, architecture or kind)
    for key, value in (_sizes(config) | (keys or {})).items():
        _add(writer, f"{kind}{key}" if key.startswith(".") else key, value)
    if vocabulary is not None:
        writer.add_tokenizer_model(vocabulary["kind"])
        writer.add_token_list(vocabulary["tokens"])
        writer.add_token_types(vocabulary["types"])
        writer.add_token_merges(vocabulary["merges"])
    for name, weights in _weights(model, kind).items():
        matrix = weights.ndim > 1
        writer.add_tensor(
            name, gguf.quantize(weights, dtype) if matrix else weights, raw_dtype=dtype if matrix else None
        )
    for name, weights in (tensors or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(config) -> dict:
    heads = config.num_attention_heads
    sizes = {
        "general.name": "tiny",
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".attention.head_count": heads,
        ".vocab_size": config.vocab_size,
    }
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * config.n_embd
        return sizes | {".feed_forward_length": inner, ".attention.layer_norm_epsilon": config.layer_norm_epsilon}
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return sizes | {
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".attention.key_length": width,
        ".rope.freq_base": float(config.rope_parameters["rope_theta"]),
        ".rope.dimension_count": width,
    }


def _add(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _weights(model, kind: str) -> dict[str, np.ndarray]:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads}
    heads["k_proj"] = getattr(model.config, "num_key_value_heads", 0)
    written = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weights = tensor.float().numpy()
        part = name.split(".")[-2]
        if kind == "llama" and part in heads:  # in the order of llama.cpp's rotary embedding
            halves = weights.reshape(heads[part], 2, -1, *weights.shape[1:])
            weights = halves.swapaxes(1, 2).reshape(weights.shape)
        if kind == "gpt2" and part in {"c_attn", "c_proj", "c_fc"} and weights.ndim == 2:
            weights = weights.T
        written[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = np.ascontiguousarray(weights)
    return written
