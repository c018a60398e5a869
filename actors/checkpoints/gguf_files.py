"""Converts a GGUF file (llama.cpp's format) to a cached checkpoint folder, once, with draftmill.actors.checkpoints.gguf_convert.

Weights are dequantised to exactly the numbers that the file encodes. Config, tokenizer and chat template come from the file.
Before anything else reads the file, its header is read here, and its tensor table compared with the file's size (ggml's
docs/gguf.md, versions 2 and 3, little-endian). Does not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import math
import re
import struct
from pathlib import Path
from typing import IO, Final

from draftmill.actors.checkpoints.made_folders import cache_folder, content_hash, make_once, run_maker
from draftmill.storage.errors import UserError

_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY, _MOST_DIMENSIONS, _DEEPEST = 8, 9, 4, 8
# Bytes and numbers of a block by ggml type, for the plain types; of others the table says only where they begin.
_PLAIN: Final = {0: (4, 1), 1: (2, 1), 2: (18, 32), 3: (20, 32), 6: (22, 32), 7: (24, 32), 8: (34, 32), 30: (2, 1)}


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
    return path.lower().endswith(".gguf")


def gguf_folder(file: Path, field: str) -> Path:
    """The cache folder with the file's checkpoint; creates it if necessary. UserError if that fails."""
    if _PART.search(file.name):
        raise UserError(
            f"{file.name} is one part of several; join them first: llama-gguf-split --merge {file.name} joined.gguf",
            field=field,
        )
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{file.name} is a GGUF file; reading it needs a package that is not installed: pip install gguf "
            f"(the extra `gguf` of this project); or convert it where that package is installed:\n{by_hand(file)}",
            field=field,
        )
    try:
        check_gguf(file)
    except DamagedGGUF as error:
        raise UserError(str(error), field=field) from None
    content = content_hash(file)
    versions = [importlib.metadata.version(name) for name in ("transformers", "gguf")]
    name = hashlib.sha256(repr((content, READER, versions)).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        what = f"converting {file.name} ({file.stat().st_size / 1e6:,.0f} MB) to safetensors"
        module = "draftmill.actors.checkpoints.gguf_convert"
        run_maker(module, [str(file), str(folder), content], field=field, what=what)

    return make_once(cache_folder() / "models" / f"{file.stem[:80]}-{name}", make)


def by_hand(file: Path) -> str:
    """The lines with which a user converts this file."""
    return LINES.format(folder=str(file.parent), file=file.name, out=file.stem)


def weights_hash(content: str) -> str:
    """The hash of a file's weights in a job's fingerprint; `content` is the hash of the file."""
    return hashlib.sha256(f"gguf\0{READER}\0{content}".encode()).hexdigest()


# ---- the header


class DamagedGGUF(ValueError):
    """The file is no GGUF file, of an unknown version, damaged, or cut off."""


class _Short(Exception):
    """The file ends within its header."""


def check_gguf(file: Path) -> None:
    """Raise DamagedGGUF unless magic, version and the tensor table fit the file."""
    from draftmill.decoders.backbones.checkpoint import pointer_problem

    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise DamagedGGUF(pointer_problem(file) or f"{file.name} is not a GGUF file: it does not begin with GGUF")
        try:
            needed = _needed_bytes(stream, size)
        except _Short:
            reason = f"it ends within its header, after {_mb(size)}"
            raise DamagedGGUF(f"{file.name} is cut off or damaged: {reason}") from None
        except DamagedGGUF as error:
            raise DamagedGGUF(f"{file.name}: {error}") from None
    if needed > size:
        raise DamagedGGUF(f"{file.name} is cut off: it has {_mb(size)}, its table of tensors needs {_mb(needed)}")


def _needed_bytes(stream: IO[bytes], size: int) -> int:
    """The size that the file must have at least."""
    (version,) = _unpack(stream, "<I")
    if version not in {2, 3}:
        raise DamagedGGUF(f"its GGUF version is {version}; supported: 2, 3")
    num_tensors, num_keys = _unpack(stream, "<QQ")
    alignment = 32
    for _ in range(min(num_keys, size)):
        key = _text(stream, size)
        (kind,) = _unpack(stream, "<I")
        if key == b"general.alignment" and kind == 4:
            (alignment,) = _unpack(stream, "<I")
        else:
            _skip(stream, kind, size)
    ends = [0]
    for _ in range(min(num_tensors, size)):
        _text(stream, size)
        (dimensions,) = _unpack(stream, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise DamagedGGUF(f"its table of tensors is damaged: a tensor has {dimensions:,} dimensions")
        shape = _unpack(stream, f"<{dimensions}Q")
        kind, offset = _unpack(stream, "<IQ")
        num_bytes, numbers = _PLAIN.get(kind, (0, 1))
        ends.append(offset + math.prod(shape) // numbers * num_bytes)
    return -(-stream.tell() // max(1, alignment)) * max(1, alignment) + max(ends)


def _unpack(stream: IO[bytes], layout: str) -> tuple[int, ...]:
    data = stream.read(struct.calcsize(layout))
    if len(data) < struct.calcsize(layout):
        raise _Short
    return struct.unpack(layout, data)


def _text(stream: IO[bytes], size: int) -> bytes:
    (length,) = _unpack(stream, "<Q")
    if length > size - stream.tell():
        raise _Short
    return stream.read(length)


def _skip(stream: IO[bytes], kind: int, size: int, depth: int = 0) -> None:
    if kind == _TEXT:
        _text(stream, size)
    elif kind == _ARRAY and depth < _DEEPEST:
        inner, count = _unpack(stream, "<IQ")
        if inner in _SIZES:
            _forward(stream, _SIZES[inner] * count, size)
            return
        for _ in range(min(count, size)):
            _skip(stream, inner, size, depth + 1)
    elif kind in _SIZES:
        _forward(stream, _SIZES[kind], size)
    else:
        raise DamagedGGUF(f"its header is damaged: a value is of kind {kind}")


def _forward(stream: IO[bytes], count: int, size: int) -> None:
    if count > size - stream.tell():
        raise _Short
    stream.seek(count, 1)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size:,} bytes"
