"""A tokenizer as plain bytes: its files, for a process on another machine, where the model's folder may be missing.

Shipping files instead of an object keeps the tokenizer the same to the bit: it is parsed from the same text everywhere.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from draftmill.actors.checkpoints.models import TOKENIZER_FILES
from draftmill.actors.rows.text import Tokenizer, load_tokenizer

_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class TokenizerParcel:
    """The files that `load_tokenizer` reads: of the model's folder, and of the tokenizer's own folder if it has another."""

    model: dict[str, bytes]
    own: dict[str, bytes] | None


def packed(folder: Path, setting: str) -> TokenizerParcel | None:
    """Pack the tokenizer of a model folder; `setting` is model.tokenizer. None if rows need no tokenizer."""
    if setting == "none":
        return None
    names = (*TOKENIZER_FILES, *_MODEL_FILES)
    own = None if setting == "auto" else _files(Path(setting).expanduser(), names)
    return TokenizerParcel(_files(folder, names), own)


def unpacked(parcel: TokenizerParcel | None) -> Tokenizer | None:
    """Load the tokenizer from its files."""
    if parcel is None:
        return None
    with tempfile.TemporaryDirectory(prefix="draftmill-tokenizer-") as place:
        model, own = Path(place, "model"), Path(place, "own")
        _write(model, parcel.model)
        if parcel.own is not None:
            _write(own, parcel.own)
        return load_tokenizer(model, "auto" if parcel.own is None else str(own))


def _files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
