"""Measures a trained causal model on held-out files and writes its folder: config, weights, tokenizer, README."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from recipes import corpus, evaluation, folder, loop
from recipes.causal import Shape, qwen2_config
from recipes.evaluation import Quality

LENGTHS = (128, 256, 512)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def save_model(out: Path, model: Qwen2ForCausalLM, shape: Shape, tokenizer: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors; copy the files of the `tokenizer`'s folder."""
    write_beside(out, qwen2_config(shape), tokenizer)
    folder.save_half(model, out / "model.safetensors")


def write_beside(out: Path, config: dict[str, Any], tokenizer: Path) -> None:
    """Write a model folder without weights: `config`, generation_config.json, and the `tokenizer`'s files."""
    write_config(out, config)
    for name in TOKENIZER_FILES:
        copy_file(tokenizer / name, out / name)


def write_config(out: Path, config: dict[str, Any]) -> None:
    """Make the model folder `out` with config.json and generation_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    loop.write_json(out / "config.json", config)
    loop.write_json(out / "generation_config.json", ends)


def copy_with_weights(source: Path, out: Path, model: Qwen2ForCausalLM) -> None:
    """Copy the model folder `source`, with the weights of `model`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        copy_file(source / name, out / name)
    folder.save_half(model, out / "model.safetensors")


def copy_file(source: Path, out: Path) -> None:
    """Copy a file to `out`, not through a link that stands there."""
    out.unlink(missing_ok=True)
    shutil.copyfile(source, out)


@torch.no_grad()
def quality(model: Qwen2ForCausalLM, prepared: corpus.Prepared, *, length: int, limit: int | None = None) -> Quality:
    """Score every token but the first of the held-out windows, in float32; ValueError where no file is as long."""
    tally, sizes = evaluation.Tally(), corpus.token_bytes(prepared.tokenizer)
    stream = prepared.held_out
    for index in evaluation.window_indices(stream, length=length, limit=limit):
        ids = torch.from_numpy(stream.ids[index]).to(model.device)
        law = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        tally.add(law.flatten(0, 1), ids[:, 1:].flatten(), sizes)
    return tally.quality(length)


def qualities(model: Qwen2ForCausalLM, prepared: corpus.Prepared) -> dict[int, Quality]:
    """`quality` at every window length."""
    return {length: quality(model, prepared, length=length) for length in LENGTHS}


def perplexity(quality: Quality) -> float:
    """Per token."""
    return math.exp(quality.nats_per_token)


def quality_table(scores: dict[int, Quality]) -> Iterable[str]:
    """The rows of a Markdown table."""
    yield "| window | perplexity per token | bits per byte | nats per token | top-1 | tokens |"
    yield "|---|---|---|---|---|---|"
    for length, q in scores.items():
        yield (
            f"| {length} | {perplexity(q):.2f} | {q.bits_per_byte:.3f} | {q.nats_per_token:.3f} | "
            f"{q.top1:.3f} | {q.tokens:,} |"
        )


def readme(name: str, settings: dict[str, str], prepared: corpus.Prepared, scores: dict[int, Quality]) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A small causal language model (Qwen2 architecture) of Python source code. Trained by `python -m recipes.ar`",
            "on the standard library of CPython, which is under the PSF license; corpus, held-out files and tokenizer",
            "are those of `asarm-tiny`. Meant for tests, demonstrations and measurements of decoders, not for writing",
            "code.",
            "",
            "## Held-out quality",
            "",
            "Consecutive windows of every held-out file; every token but a window's first, given those before it in the",
            "window.",
            "",
            *quality_table(scores),
            "",
            *folder.provenance(settings, prepared.held_out_paths, "neither the model nor the tokenizer"),
        ]
    )
