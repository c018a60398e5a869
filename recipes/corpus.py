"""The training corpus: the interpreter's own standard library, split into training and held-out files, tokenised.

The split depends on nothing but the files' relative paths, so it is the same on every machine with the same Python.
Tests are left out (they are a different kind of text), and so are the generated files of `encodings`, `pydoc_data` and
`_sysconfigdata*`: tables that are nearly equal on both sides of the split and would flatter the result.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")  # ids as in XLNet
BOS_ID, EOS_ID, PAD_ID, MASK_ID = 1, 2, 5, 6
HELD_OUT_SHARE = 0.06
EXCLUDED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"})
EXCLUDED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the library's root, and its text exactly as stored."""

    path: str
    text: str


@dataclass(frozen=True)
class TokenStream:
    """Tokenised files end to end: `ids` and `line_starts` of shape [T]; file f is `ids[bounds[f] : bounds[f + 1]]`."""

    ids: NDArray[np.int64]
    line_starts: NDArray[np.bool_]
    bounds: NDArray[np.int64]


def is_held_out(path: str) -> bool:
    """Whether the file belongs to the held-out set, decided by a hash of its relative path alone."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """The library's Python sources in path order, each distinct text once; files that are not UTF-8 are left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda item: item.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS & set(relative.parts[:-1]) or relative.name.startswith(EXCLUDED_PREFIX):
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text and text not in seen:
            seen.add(text)
            files.append(SourceFile(relative.as_posix(), text))
    return files


def split(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Training files and held-out files, each in path order."""
    return [f for f in files if not is_held_out(f.path)], [f for f in files if is_held_out(f.path)]


def train_tokenizer(files: list[SourceFile], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over `files` with XLNet's special ids; any text round-trips, whitespace included.

    Encode with `split_special_tokens=True` where the text itself may contain the spelling of a special token.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator((file.text for file in files), trainer)
    names = ("unk", "bos", "eos", "cls", "sep", "pad", "mask")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(SPECIAL_TOKENS[7:]),
        **{f"{name}_token": token for name, token in zip(names, SPECIAL_TOKENS, strict=False)},
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of `text`, none of them special whatever the text spells."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64]:
    """How many bytes of text each id stands for, [V]; zero for special tokens."""
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([0 if index < len(SPECIAL_TOKENS) else len(piece) for index, piece in enumerate(pieces)])


def tokenise(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> TokenStream:
    """Encode every file; a token starts a line where it is a file's first or the one before it contains a newline."""
    newline = np.array(["Ċ" in piece for piece in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))])
    encoded = [np.array(encode(tokenizer, file.text), dtype=np.int64) for file in files]
    bounds = np.cumsum([0, *(len(ids) for ids in encoded)])
    ids = np.concatenate(encoded)
    line_starts = np.zeros(len(ids), dtype=np.bool_)
    line_starts[1:] = newline[ids[:-1]]
    line_starts[bounds[:-1]] = True
    return TokenStream(ids, line_starts, bounds)


@dataclass(frozen=True)
class Prepared:
    """The data that both training and evaluation need."""

    tokenizer: PreTrainedTokenizerFast
    train: TokenStream
    held_out: TokenStream
    held_out_paths: list[str]

    def describe(self) -> dict[str, str]:
        """Corpus and tokenizer in words, for a model's README."""
        return {
            "corpus": f"CPython {platform.python_version()} standard library without tests, `encodings` and "
            f"`pydoc_data`; {len(self.train.ids):,} tokens, {len(self.held_out.ids):,} held out",
            "tokenizer": f"byte-level BPE, {len(self.tokenizer)} ids, trained on the training files",
        }


def prepare(train: list[SourceFile], held_out: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Prepared:
    """Encode both parts of a split."""
    paths = [file.path for file in held_out]
    return Prepared(tokenizer, tokenise(tokenizer, train), tokenise(tokenizer, held_out), paths)
