"""Writes the folder of a causal model that fills in the middle: config, weights, tokenizer with three more tokens, README."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from recipes import causal_folder, fim_quality, folder, loop
from recipes.causal import Shape, qwen2_config
from recipes.fim_windows import FIM_TOKENS


def extend_tokenizer(start: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in `start` with FIM_TOKENS after its last id."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    added = [AddedToken(token, special=True, normalized=False) for token in FIM_TOKENS]
    tokenizer.add_tokens(added, special_tokens=True)
    return tokenizer


def save_model(out: Path, model: Qwen2ForCausalLM, shape: Shape, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write config.json, generation_config.json, model.safetensors in int8 and the tokenizer's two files."""
    causal_folder.write_config(out, qwen2_config(shape) | {"quantization_config": folder.INT8})
    tokenizer.save_pretrained(out)
    folder.write_int8(loop.distinct_tensors(model), out / "model.safetensors")


def readme(name: str, settings: dict[str, str], held_out_paths: list[str], report: fim_quality.Report) -> str:
    """The folder's README in Markdown."""
    return "\n".join(
        [
            f"# {name}",
            "",
            "A small causal language model (Qwen2 architecture) of Python source code that fills in the middle of a text.",
            "Trained by `python -m recipes.fim` on the standard library of CPython, which is under the PSF license; corpus",
            "and held-out files are those of `asarm-tiny`. Meant for tests, demonstrations and measurements of decoders,",
            "not for writing code.",
            "",
            "A prompt is `<|fim_prefix|>` P `<|fim_suffix|>` S `<|fim_middle|>`; the middle ends with `</s>`.",
            "",
            "## Held-out quality",
            "",
            *fim_quality.tables(report),
            "",
            *folder.provenance(settings, held_out_paths, "neither the model nor the tokenizer"),
        ]
    )
