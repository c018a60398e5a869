"""Writes and reads a model folder: XLNet config and float16 weights, the tokenizer, the draft heads, a README."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from draftmill.decoders.backbones.heads.files import HeadKind
from draftmill.decoders.backbones.heads.markov import DraftHeads
from recipes.evaluation import Quality
from recipes.loop import distinct_tensors, write_json
from recipes.two_stream import Shape, TwoStream

MAX_LENGTH = 512


# config.json's quantization_config of a folder that `write_int8` wrote.
INT8: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


def xlnet_config(shape: Shape) -> dict[str, Any]:
    """The whole of config.json. `draftmill.max_length` is the longest window trained on, in tokens."""
    return {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        **shape.config(),
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "untie_r": True,
        "same_length": False,
        "mem_len": None,
        "reuse_len": None,
        "use_mems_eval": False,
        "ff_activation": "gelu",
        "dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 5,
        "torch_dtype": "float16",
        "draftmill": {"max_length": MAX_LENGTH},
    }


def save_half(module: nn.Module, path: Path) -> None:
    """Store every parameter in float16 under its own name."""
    write_half(distinct_tensors(module), path)


def write_half(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Store tensors in float16."""
    _write({name: tensor.detach().cpu().half() for name, tensor in tensors.items()}, path)


def write_int8(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Store the matrices of layers as `INT8` says, [M, K] with scales [M, 1] in float16, and all other tensors in float16."""
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = half = tensor.detach().cpu().half()
        if name.endswith("_proj.weight"):
            scale_M1 = (half.float().abs().amax(1, keepdim=True) / 127).half()
            stored[name] = (half.float() / scale_M1.float()).round().clamp(-127, 127).to(torch.int8)
            stored[f"{name}_scale"] = scale_M1
    _write(stored, path)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves the file readable by its owner alone


def save_model(folder: Path, model: TwoStream, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config.json, model.safetensors and the tokenizer's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", xlnet_config(model.shape))
    save_half(model, folder / "model.safetensors")
    tokenizer.save_pretrained(folder)


def load_model(folder: Path, device: torch.device) -> TwoStream:
    """The stored model in float32: heads are trained and figures measured on the shipped weights."""
    config = json.loads((folder / "config.json").read_text())
    model = TwoStream(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval()


def save_draft_heads(folder: Path, heads: DraftHeads, kind: HeadKind = "assd") -> None:
    """Write draft_head.json (kind and sizes) and draft_head.safetensors; decoders/backbones/heads.py reads them."""
    save_half(heads, folder / "draft_head.safetensors")
    write_json(folder / "draft_head.json", {"kind": kind, **heads.sizes()})


@dataclass(frozen=True)
class Report:
    """The README's figures: `quality[length][revealed]`, `acceptance[revealed][drafter]` per count of unseen tokens."""

    settings: dict[str, str]
    held_out_paths: list[str]
    quality: dict[int, dict[float, Quality]]
    acceptance: dict[float, dict[str, list[float]]]


def readme(name: str, report: Report) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A small any-subset model (XLNet architecture, two-stream attention) for infilling Python source code,",
            "and its draft heads. Trained by `python -m recipes.asarm` on the standard library of CPython, which is",
            "under the PSF license. Meant for tests, demonstrations and measurements of decoders, not for writing",
            "code.",
            "",
            "## Held-out quality",
            "",
            "Random positions masked, decoded from left to right with the true tokens before each: the joint probability of",
            "sequential decoding.",
            "",
            *_quality_table(report.quality),
            "",
            "## Acceptance of the drafts",
            "",
            "Mean of sum_v min(p, q) at temperature 1, true tokens as context, by how many tokens the row lacks:",
            "`stale` is the bare row, `markov` the same row corrected by the draft head.",
            "",
            *_acceptance_table(report.acceptance),
            "",
            "## NFE per token",
            "",
            "<!-- filled in from benchmarks/RESULTS.md -->",
            "",
            *provenance(report.settings, report.held_out_paths, "neither the model, nor the tokenizer, nor the heads"),
        ]
    )


def provenance(settings: dict[str, str], held_out_paths: list[str], who: str) -> list[str]:
    """The last two sections of a README: how the model was trained, and which files `who` have not seen."""
    return [
        "## Training",
        "",
        *(f"- {key}: {value}" for key, value in settings.items()),
        "",
        "## Held-out files",
        "",
        f"Chosen by a hash of the path; {who} have seen them.",
        "",
        *(f"- `{path}`" for path in held_out_paths),
        "",
    ]


def _quality_table(quality: dict[int, dict[float, Quality]]) -> list[str]:
    rows = ["| window | revealed | bits per byte | nats per token | top-1 | tokens |", "|---|---|---|---|---|---|"]
    for length, by_share in quality.items():
        rows += [
            f"| {length} | {share:.0%} | {q.bits_per_byte:.3f} | {q.nats_per_token:.3f} | {q.top1:.3f} | {q.tokens:,} |"
            for share, q in by_share.items()
        ]
    return rows


def _acceptance_table(acceptance: dict[float, dict[str, list[float]]]) -> list[str]:
    steps = len(next(iter(next(iter(acceptance.values())).values())))
    rows = [
        "| revealed | drafter | " + " | ".join(str(step + 1) for step in range(steps)) + " |",
        "|---|---|" + "---|" * steps,
    ]
    for share, by_name in acceptance.items():
        rows += [f"| {share:.0%} | {name} | " + " | ".join(f"{a:.3f}" for a in v) + " |" for name, v in by_name.items()]
    return rows
