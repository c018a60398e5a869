"""Writes and reads a block-diffusion model's folder, laid out like public SDAR checkpoints, and its README.

config.json has SDAR's keys, the weights Qwen3's names, which are SDAR's; there is no code in the folder, and none is needed.
The tokenizer is that of the causal model that training started from.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from recipes import block_quality, block_training, folder
from recipes.block_layout import BLOCK
from recipes.block_quality import Report
from recipes.causal import MAX_LENGTH, Shape
from recipes.causal_folder import write_beside
from recipes.corpus import BOS_ID, EOS_ID, MASK_ID, PAD_ID


def sdar_config(shape: Shape) -> dict[str, Any]:
    """The whole of config.json. `draftmill.max_length` is the longest window trained on, in tokens."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **asdict(shape),
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": block_training.RMS_NORM_EPS,
        "rope_theta": block_training.ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": MAX_LENGTH,
        "max_window_layers": shape.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "block_size": BLOCK,
        "mask_token_id": MASK_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float16",
        "draftmill": {"max_length": MAX_LENGTH},
    }


def save_model(out: Path, model: Qwen3ForCausalLM, shape: Shape, tokenizer: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors; copy the files of the `tokenizer`'s folder."""
    write_beside(out, sdar_config(shape), tokenizer)
    folder.save_half(model, out / "model.safetensors")


def load_model(path: Path, device: torch.device) -> Qwen3ForCausalLM:
    """The stored model in float32: figures are measured on the shipped weights."""
    config = json.loads((path / "config.json").read_text())
    model = block_training.empty_model(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    weights = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    torch.nn.Module.to(model, device)
    return model.eval()


def readme(name: str, settings: dict[str, str], held_out_paths: list[str], report: Report) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A small block-diffusion model (SDAR's layout: a Qwen3 that sees the text before a block and the whole block)",
            "of Python source code. Trained by `python -m recipes.block` on the standard library of CPython, which is under",
            "the PSF license; corpus, held-out files and tokenizer are those of `asarm-tiny`. Meant for tests,",
            "demonstrations and measurements of decoders, not for writing code.",
            "",
            "## Held-out quality",
            "",
            *block_quality.tables(report),
            "",
            *folder.provenance(settings, held_out_paths, "neither the model nor the tokenizer"),
        ]
    )
