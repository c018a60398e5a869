"""Converts text to token ids and back, exactly: by default nothing is added, cleaned up or parsed as a special token.

Wraps the tokenizer and the chat template of a Hugging Face checkpoint. The `tokenizers` library alone reads a tokenizer.json;
transformers, which takes seconds to import, is imported only for older formats.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmill.actors.checkpoints.made_folders import read_source
from draftmill.storage.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from draftmill.actors.rows.chat import ChatTemplate

_FIELD = "model.tokenizer"
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Tokenizers of remote code that are identical to one of transformers.
_KNOWN_AS = {"DreamTokenizer": "Qwen2Tokenizer"}
_PROBE = ("a b", "c\n d", "  e")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer whose `decode(encode(text))` is as close to `text` as the vocabulary allows.

    `bos_id` and `eos_id` are its begin and end tokens, None if it has none. `chat` renders a conversation up to the start of the
    model's answer, with special tokens spelled out; None if the tokenizer has no chat template.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        # Disable settings of the checkpoint's file: truncation, padding, and parsing of special tokens in the text.
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = True
        self._core = core
        self.bos_id, self.eos_id, self.chat = bos_id, eos_id, chat

    @property
    def size(self) -> int:
        """All ids are below this number."""
        return self._core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the spelling of a special token in it is treated as plain text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text. Unlike the library's `encode`, this releases the interpreter's lock."""
        return [found.ids for found in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_behind(self, text: str) -> list[int]:
        """Ids of `text` that follows other text: without the space that some vocabularies put before a text."""
        if self.joins:
            return self.encode(text)
        # No vocabulary merges this character with following text; the reference code of CodeLlama and Codestral uses it, too.
        before, ids = self.encode("\u263a"), self.encode(f"\u263a{text}")
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text)

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and the [start, end) characters of each."""
        (found,) = self._core.encode_batch([text], add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, including special tokens; bytes that form no character become U+FFFD. Never raises."""
        return self._core.decode(list(ids), skip_special_tokens=False)

    def continuation(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids` that follow other text: keeps a leading space, which some vocabularies drop at the start of a text.

        With `skip_special`, special tokens have no text, as in transformers' `decode(ids, skip_special_tokens=True)`.
        """
        before, shown = self._before
        return self.decode([*before, *(self.without_special(ids) if skip_special else ids)])[len(shown) :]

    def without_special(self, ids: Sequence[int]) -> list[int]:
        """The `ids` that are not special tokens."""
        return [token for token in ids if token not in self.special]

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, such as those that begin and end a text, with their spellings."""
        added = self._core.get_added_tokens_decoder()
        return {token: str(found.content) for token, found in added.items() if found.special}

    def parse(self, text: str) -> list[int]:
        """Ids of `text` in which special tokens are spelled out, as in a rendered chat."""
        return self._parsing.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single byte (the byte fallback of SentencePiece)."""
        return _BYTE.fullmatch(self._core.id_to_token(token) or "") is not None

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return self._core.get_vocab(with_added_tokens=True)

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The special tokens that transformers' `tokenizer(text)` puts before a text, without those that it puts after it."""
        found = self._core.encode("a", add_special_tokens=True)
        return tuple(found.ids[: sum(takewhile(bool, found.special_tokens_mask))])

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        ids = self.encode("a")
        return ids, self.decode(ids)

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        # A copy: parsing is a setting of the whole tokenizer, and changing it would affect `encode`.
        return type(self._core).from_str(self._core.to_str())

    @cached_property
    def joins(self) -> bool:
        """Whether pieces of a text, encoded separately, decode to the text; true for byte-level vocabularies."""
        return self.decode([token for piece in _PROBE for token in self.encode(piece)]) == "".join(_PROBE)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path, setting: str = "auto", *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a model folder (`auto`), of another folder (a path), or None (`none`).

    A tokenizer without a begin token gets the one of the model's configuration. Raises UserError if there is no tokenizer,
    or if it can't be loaded.
    """
    from draftmill.decoders.backbones.checkpoint import bos_id

    if setting == "none":
        return None
    place = folder if setting == "auto" else Path(setting).expanduser()
    if not has_tokenizer(place):
        reason = (read_source(place) or {}).get("tokenizer")
        if reason is not None:
            raise UserError(f"{reason}; allowed: a folder with the original model's tokenizer, or none", field=_FIELD)
        raise UserError(
            f"{setting!r}: {place} has no tokenizer ({', '.join(_FILES)}); allowed: auto, a folder, or none for rows "
            "that give tokens",
            field=_FIELD,
        )
    core, bos, eos, chat = _read(place, trust_remote_code)
    return Tokenizer(core, bos_id=bos_id(folder) if bos is None else bos, eos_id=eos, chat=chat)


Parts = tuple["tokenizers.Tokenizer", int | None, int | None, "ChatTemplate | None"]
"""A tokenizer, its begin and end tokens, and its chat template."""


def _read(place: Path, trust_remote_code: bool) -> Parts:
    """Read tokenizer.json if there is one; leave other formats to transformers, whose import takes seconds.

    AutoTokenizer chooses by the model's type, and for some types replaces the file's pre-tokenizer with that family's own. A
    model with another vocabulary than its family's would then get other tokens than in its training.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from draftmill.actors.rows.chat import ChatTemplate
    from draftmill.actors.rows.tokenizer_files import NotPlain, read_files

    try:
        files = read_files(place)
    except NotPlain:
        return _read_by_transformers(place, trust_remote_code)
    except Exception as error:  # the library raises anything for a damaged file, bare Exception included
        raise _damaged(place, error) from error
    chat = None if files.template is None else ChatTemplate(files.template, files.names)
    return files.core, files.id_of("bos_token"), files.id_of("eos_token"), chat


def _read_by_transformers(place: Path, trust_remote_code: bool) -> Parts:
    inner = _load(place, trust_remote_code)
    return inner.backend_tokenizer, inner.bos_token_id, inner.eos_token_id, _chat_of(inner)


def _chat_of(inner: Any) -> ChatTemplate | None:
    from draftmill.actors.rows.chat import ChatTemplate

    try:
        source = inner.get_chat_template()
    except ValueError:  # it has no template, or several without a default
        return None
    return ChatTemplate(source, inner.special_tokens_map)


def _damaged(place: Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"the tokenizer in {place} can't be loaded: {reason[0]}", field=_FIELD)


def _load(place: Path, trust_remote_code: bool) -> Any:
    """Load a tokenizer with transformers."""
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (place / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(place), local_files_only=True)
        if (known := _KNOWN_AS.get(_class_named(place))) is not None:
            return getattr(transformers, known).from_pretrained(str(place), local_files_only=True)
        inner: Any = AutoTokenizer.from_pretrained(
            str(place), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the libraries raise anything for a damaged file, bare Exception included
        raise _damaged(place, error) from error
    if not inner.is_fast:
        raise UserError(f"the tokenizer in {place} has no fast version, which draftmill needs", field=_FIELD)
    return inner


def _class_named(place: Path) -> str:
    """The tokenizer class that tokenizer_config.json names; empty if it names none."""
    file = place / "tokenizer_config.json"
    return str(json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class", "")) if file.is_file() else ""
