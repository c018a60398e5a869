"""A checkpoint in one GGUF file, as llama.cpp keeps them, as a checkpoint folder: converted once, by actors.gguf_convert.

Weights are dequantised to the exact numbers that the file stands for. Config, tokenizer and chat template are the file's own.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from functools import partial
from pathlib import Path

from actors.made_folders import cache_folder, content_hash, made_once, run_maker
from storage.errors import UserError

READER = 1
"""Goes up when the conversion gives other numbers or other tokens; it is part of the hash that stands for the weights."""

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

LINES = """\
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pip install gguf accelerate
    folder, file, out = {folder!r}, {file!r}, {out!r}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer, model.config.quantization_config = None, None
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.save_pretrained(out)
    print(tokenizer.tokenize("In 2024: don't"))  # compare with the original tokenizer: not every file's rules are read
    # then, in the spec: model.path: {out}"""
"""The ten lines with which a user converts a file by hand."""


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file."""
    return path.lower().endswith(".gguf")


def gguf_folder(file: Path, field: str) -> Path:
    """The folder of the cache that holds the file's checkpoint, made if need be. UserError where it can't be had."""
    if _PART.search(file.name):
        raise UserError(
            f"{file.name} is one part of several; join them first: llama-gguf-split --merge {file.name} joined.gguf",
            field=field,
        )
    check_package(file, field)
    content = content_hash(file)
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf")]
    name = hashlib.sha256(repr((content, READER, versions)).encode()).hexdigest()[:16]
    make = partial(_convert, file, content, field)
    return made_once(cache_folder() / "models" / f"{file.stem[:80]}-{name}", make)


def check_package(file: Path, field: str) -> None:
    """Raise UserError, with the lines that convert the file elsewhere, where the package that reads it is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{file.name} is a GGUF file, and the package that reads it is not installed: pip install gguf "
            f"(the extra `gguf` of this project); or convert it where it is:\n{by_hand(file)}",
            field=field,
        )


def by_hand(file: Path) -> str:
    """The lines that convert a file by hand."""
    return LINES.format(folder=str(file.parent), file=file.name, out=file.stem)


def weights_hash(content: str) -> str:
    """The hash that stands for the weights of a file with this content in a job's fingerprint."""
    return hashlib.sha256(f"gguf\0{READER}\0{content}".encode()).hexdigest()


def _convert(file: Path, content: str, field: str, folder: Path) -> None:
    what = f"converting {file.name} ({file.stat().st_size / 1e6:,.0f} MB) to safetensors"
    run_maker("actors.gguf_convert", [str(file), str(folder), content], field=field, what=what)
