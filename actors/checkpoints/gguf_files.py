"""Converts a GGUF file (llama.cpp's format) to a cached checkpoint folder, once, with draftmill.actors.checkpoints.gguf_convert.

Weights are dequantised to exactly the numbers that the file encodes. Config, tokenizer and chat template come from the file.
Does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from functools import partial
from pathlib import Path

from draftmill.actors.checkpoints.gguf_header import DamagedGGUF, check_gguf
from draftmill.actors.checkpoints.made_folders import cache_folder, content_hash, made_once, run_maker
from draftmill.storage.errors import UserError

READER = 1
"""Version of the conversion, a part of the weights' hash; increase it when it gives other numbers or tokens."""

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
"""Ten lines of Python with which a user can convert a file."""


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file."""
    return path.lower().endswith(".gguf")


def gguf_folder(file: Path, field: str) -> Path:
    """The cache folder with the file's checkpoint; creates it if necessary. UserError if that fails."""
    if _PART.search(file.name):
        raise UserError(
            f"{file.name} is one part of several; join them first: llama-gguf-split --merge {file.name} joined.gguf",
            field=field,
        )
    check_package(file, field)
    try:
        check_gguf(file)
    except DamagedGGUF as error:
        raise UserError(str(error), field=field) from None
    content = content_hash(file)
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf")]
    name = hashlib.sha256(repr((content, READER, versions)).encode()).hexdigest()[:16]
    make = partial(_convert, file, content, field)
    return made_once(cache_folder() / "models" / f"{file.stem[:80]}-{name}", make)


def check_package(file: Path, field: str) -> None:
    """Raise UserError, with the lines that convert the file elsewhere, if the package `gguf` is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{file.name} is a GGUF file; reading it needs a package that is not installed: pip install gguf "
            f"(the extra `gguf` of this project); or convert it where that package is installed:\n{by_hand(file)}",
            field=field,
        )


def by_hand(file: Path) -> str:
    """The lines with which a user converts this file."""
    return LINES.format(folder=str(file.parent), file=file.name, out=file.stem)


def weights_hash(content: str) -> str:
    """The hash of a file's weights in a job's fingerprint; `content` is the hash of the file."""
    return hashlib.sha256(f"gguf\0{READER}\0{content}".encode()).hexdigest()


def _convert(file: Path, content: str, field: str, folder: Path) -> None:
    what = f"converting {file.name} ({file.stat().st_size / 1e6:,.0f} MB) to safetensors"
    run_maker("draftmill.actors.checkpoints.gguf_convert", [str(file), str(folder), content], field=field, what=what)
