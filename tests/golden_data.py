"""Reads golden data: the larger files of tests/data are compressed, `NAME.xz`."""

import json
import lzma
from pathlib import Path

from safetensors.torch import load
from torch import Tensor


def read_json(path: Path):
    """The object in `path`, or in `path`.xz."""
    return json.loads(_read(path))


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The tensors of `path`, or of `path`.xz."""
    return load(_read(path))


def _read(path: Path) -> bytes:
    packed = path.with_name(path.name + ".xz")
    return lzma.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
