"""Writes and reads a masked-diffusion model's folder, laid out like public LLaDA checkpoints, and its README.

config.json has LLaDA's keys, the weights LLaDA's names; there is no code in the folder, and none is needed. The tokenizer is
that of the causal model that training started from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from draftmill.decoders.backbones.families.masked import llada_name
from draftmill.decoders.backbones.families.table import FAMILIES
from draftmill.decoders.backbones.load import load_weights
from recipes import absorbing, absorbing_quality, folder
from recipes.absorbing_quality import Report
from recipes.causal import MAX_LENGTH, Shape
from recipes.causal_folder import write_beside
from recipes.corpus import BOS_ID, EOS_ID, MASK_ID, PAD_ID

SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "embedding_size": "vocab_size",
}


def llada_config(shape: Shape) -> dict[str, Any]:
    """The whole of config.json. `draftmill.max_length` is the longest window trained on, in tokens."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        **{theirs: getattr(shape, ours) for theirs, ours in SIZES.items()},
        "max_sequence_length": MAX_LENGTH,
        "block_type": "llama",
        "block_group_size": 1,
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "rms_norm_eps": absorbing.RMS_NORM_EPS,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": absorbing.ROPE_THETA,
        "alibi": False,
        "attention_layer_norm": False,
        "multi_query_attention": None,
        "include_bias": False,
        "include_qkv_bias": False,
        "bias_for_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "init_std": 0.02,
        "weight_tying": True,
        "mask_token_id": MASK_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float16",
        "draftmill": {"max_length": MAX_LENGTH},
    }


def save_model(out: Path, model: LlamaForCausalLM, shape: Shape, tokenizer: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors; copy the files of the `tokenizer`'s folder."""
    config, weights = llada_config(shape), model.state_dict()
    write_beside(out, config, tokenizer)
    names = FAMILIES["llada"].shape(config).tensors()
    tensors = {llada_name(name): weights[name] for name in names}
    folder.write_half(tensors, out / "model.safetensors")


def load_model(path: Path, device: torch.device) -> LlamaForCausalLM:
    """The stored model in float32: figures are measured on the shipped weights."""
    config = json.loads((path / "config.json").read_text())
    model = absorbing.empty_model(Shape(**{ours: config[theirs] for theirs, ours in SIZES.items()}))
    weights = FAMILIES["llada"].own_names(config, load_weights(path, dtype=torch.float32))
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    torch.nn.Module.to(model, device)
    return model.eval()


def readme(name: str, settings: dict[str, str], held_out_paths: list[str], report: Report) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A small masked-diffusion model (LLaDA's layout: a Llama that sees its whole window) of Python source code.",
            "Trained by `python -m recipes.mdm` on the standard library of CPython, which is under the PSF license;",
            "corpus, held-out files and tokenizer are those of `asarm-tiny`. It infills and completes, and drafts for",
            "`ar-tiny`. Meant for tests, demonstrations and measurements of decoders, not for writing code.",
            "",
            "## Held-out quality",
            "",
            *absorbing_quality.tables(report),
            "",
            "## Decoding",
            "",
            "<!-- filled in from measurements -->",
            "",
            *folder.provenance(settings, held_out_paths, "neither the model nor the tokenizer"),
        ]
    )
