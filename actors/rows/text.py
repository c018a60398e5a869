"""Converts text to token ids and back, exactly: by default nothing is added, cleaned up or parsed as a special token.

Wraps the tokenizer and the chat template of a Hugging Face checkpoint. tokenizer.json is the tokenizer; the other files name the
special tokens, may add tokens, and hold the chat template. They are read here like transformers does: transformers itself, which
takes seconds to import, is imported only for older formats. Source: `PreTrainedTokenizerBase._from_pretrained` and
`TokenizersBackend` in transformers; tests/actors/rows/test_tokenizer_files.py compares the results.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from draftmill.actors.checkpoints.made_folders import read_source
from draftmill.storage.errors import UserError
from draftmill.storage.json_text import read_object

if TYPE_CHECKING:
    from draftmill.actors.rows.chat import ChatTemplate

Token = str | AddedToken

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
# Settings of tokenizer_config.json with which transformers changes the tokenizer by its own rules.
_NOT_OURS = ("fix_mistral_regex", "fast_tokenizer_files")

_FIELD = "model.tokenizer"
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Tokenizers of remote code that are identical to one of transformers.
_KNOWN_AS = {"DreamTokenizer": "Qwen2Tokenizer"}
_PROBE = ("a b", "c\n d", "  e")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Byte-level vocabularies spell bytes as characters: those that can be printed as themselves, the others from U+0100 on.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}


class Tokenizer:
    """A tokenizer whose `decode(encode(text))` is as close to `text` as the vocabulary allows.

    `bos_id` and `eos_id` are its begin and end tokens, None if it has none. `chat` renders a conversation up to the start of the
    model's answer, with special tokens spelled out; None if the tokenizer has no chat template.
    """

    def __init__(
        self, core: Core, *, bos_id: int | None = None, eos_id: int | None = None, chat: ChatTemplate | None = None
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
        # Unlike the library's `encode`, this releases the interpreter's lock.
        return self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_behind(self, text: str) -> list[int]:
        """Ids of `text` that follows other text: without the space that some vocabularies put before a text."""
        if self.joins:
            return self.encode(text)
        # No vocabulary merges this character with following text; the reference code of CodeLlama and Codestral uses it, too.
        before, ids = self.encode("\u263a"), self.encode(f"\u263a{text}")
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text)

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and the [start, end) characters of each."""
        (encoding,) = self._core.encode_batch([text], add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, including special tokens; bytes that form no character become U+FFFD. Never raises."""
        return self._core.decode(list(ids), skip_special_tokens=False)

    def continuation(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids` that follow other text: keeps a leading space, which some vocabularies drop at the start of a text.

        With `skip_special`, special tokens have no text, as in transformers' `decode(ids, skip_special_tokens=True)`.
        """
        before, shown = self._before
        spelled = [token for token in ids if token not in self.special] if skip_special else ids
        return self.decode([*before, *spelled])[len(shown) :]

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, such as those that begin and end a text, with their spellings."""
        added = self._core.get_added_tokens_decoder()
        return {number: str(token.content) for number, token in added.items() if token.special}

    @cached_property
    def _added(self) -> dict[int, str]:
        return {number: str(token.content) for number, token in self._core.get_added_tokens_decoder().items()}

    def parse(self, text: str) -> list[int]:
        """Ids of `text` in which special tokens are spelled out, as in a rendered chat."""
        return self._parsing.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single byte (the byte fallback of SentencePiece)."""
        return _BYTE.fullmatch(self._core.id_to_token(token) or "") is not None

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for inside of a text; None if it has no text, as special tokens."""
        spelled = self._core.id_to_token(token)
        if spelled is None or token in self.special:
            return None
        if token in self._added:
            return self._added[token].encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[character] for character in spelled) if set(spelled) <= _BYTE_OF.keys() else None
        if _BYTE.fullmatch(spelled):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("\u2581", " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._core.to_str())["decoder"])

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return self._core.get_vocab(with_added_tokens=True)

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The special tokens that transformers' `tokenizer(text)` puts before a text, without those that it puts after it."""
        encoding = self._core.encode("a", add_special_tokens=True)
        return tuple(encoding.ids[: sum(takewhile(bool, encoding.special_tokens_mask))])

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        ids = self.encode("a")
        return ids, self.decode(ids)

    @cached_property
    def _parsing(self) -> Core:
        # A copy: parsing is a setting of the whole tokenizer, and changing it would affect `encode`.
        return type(self._core).from_str(self._core.to_str())

    @cached_property
    def joins(self) -> bool:
        """Whether pieces of a text, encoded separately, decode to the text; true for byte-level vocabularies."""
        return self.decode([token for piece in _PROBE for token in self.encode(piece)]) == "".join(_PROBE)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(folder: Path, setting: str = "auto", *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a model folder (`auto`), of another folder (a path), or None (`none`).

    A tokenizer without a begin token gets the one of the model's configuration. Raises UserError if there is no tokenizer,
    or if it can't be loaded.
    """
    from draftmill.decoders.backbones.checkpoint import bos_id, pointer_problem

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
    for path in sorted(place.iterdir()):
        if path.suffix in {".json", ".model", ".txt", ".jinja"} and (problem := pointer_problem(path)):
            raise UserError(problem, field=_FIELD)
    stats = ((path.name, path.stat()) for path in sorted(place.iterdir()) if path.is_file())
    stamp = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return _loaded(place, trust_remote_code, bos_id(folder), stamp)


@lru_cache(maxsize=4)
def _loaded(place: Path, trust_remote_code: bool, begin: int | None, stamp: Hashable) -> Tokenizer:
    """The tokenizer of these files, which the jobs of a process share: by tokenizer.json if there is one, else by transformers.

    AutoTokenizer chooses by the model's type, and for some types replaces the file's pre-tokenizer with that family's own. A
    model with another vocabulary than its family's would then get other tokens than in its training.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from draftmill.actors.rows.chat import ChatTemplate

    try:
        core, names, template = read_files(place)
    except NotPlain:
        inner = _load(place, trust_remote_code)
        try:
            chat = ChatTemplate(inner.get_chat_template(), inner.special_tokens_map)
        except ValueError:  # it has no template, or several without a default
            chat = None
        core, bos, eos = inner.backend_tokenizer, inner.bos_token_id, inner.eos_token_id
    except Exception as error:  # the library raises anything for a damaged file, bare Exception included
        raise _load_error(place, error) from error
    else:
        bos, eos = (core.token_to_id(names[name]) if name in names else None for name in ("bos_token", "eos_token"))
        chat = None if template is None else ChatTemplate(template, names)
    return Tokenizer(core, bos_id=begin if bos is None else bos, eos_id=eos, chat=chat)


def _load(place: Path, trust_remote_code: bool) -> Any:
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (place / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(place), local_files_only=True)
        if known := _KNOWN_AS.get(str(read_object(place / "tokenizer_config.json").get("tokenizer_class"))):
            return getattr(transformers, known).from_pretrained(str(place), local_files_only=True)
        inner: Any = AutoTokenizer.from_pretrained(
            str(place), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the libraries raise anything for a damaged file, bare Exception included
        raise _load_error(place, error) from error
    if not inner.is_fast:
        raise UserError(f"the tokenizer in {place} has no fast version, which draftmill needs", field=_FIELD)
    return inner


def _load_error(place: Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"the tokenizer in {place} can't be loaded: {reason[0]}", field=_FIELD)


class NotPlain(Exception):
    """Only transformers can read the files, if at all."""


def read_files(place: Path) -> tuple[Core, dict[str, str], str | None]:
    """The tokenizer in a folder; its special tokens by name ({bos_token: <s>}), all in its vocabulary; its chat template, if it
    has one. Raises NotPlain, or whatever the libraries raise for a damaged file.
    """
    path = place / "tokenizer.json"
    if not path.is_file():
        raise NotPlain("no tokenizer.json")
    config = read_object(place / "tokenizer_config.json")
    if any(name in config for name in _NOT_OURS):
        raise NotPlain("settings that change the tokenizer")
    if _OLD_EXTRA in config and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_OLD_EXTRA)
    core = Core.from_file(str(path))
    added = _added_tokens(place, config, core)
    named = _special_tokens(config, core, {str(token): token for token in added})
    _add(core, added, list(named.values()), _extra(config))
    return core, {name: str(token) for name, token in named.items()}, _template(place, config)


def _added_tokens(place: Path, config: Mapping[str, Any], core: Core) -> list[AddedToken]:
    """The tokens that tokenizer_config.json adds, or tokenizer.json itself, by id."""
    if (listed := config.get("added_tokens_decoder")) is not None:
        return [AddedToken(**listed[key]) for key in sorted(listed, key=int)]
    if any((place / name).is_file() for name in ("special_tokens_map.json", "added_tokens.json")):
        raise NotPlain("older files")
    tokens = core.get_added_tokens_decoder()
    return [tokens[number] for number in sorted(tokens)]


def _special_tokens(config: Mapping[str, Any], core: Core, added: Mapping[str, AddedToken]) -> dict[str, Token]:
    """The special tokens that have a name, the well-known ones first."""
    others = [name for name in config if name.endswith("_token") and name not in _NAMED]
    tokens: dict[str, Token] = {}
    for name in (*_NAMED, *others):
        token = _token(config.get(name))
        if token is not None:
            tokens[name] = added.get(str(token), token) if name in _NAMED else token
        elif name in _NAMED and config.get(name) is not None:
            raise NotPlain(f"{name} is not a token")
    if core.padding is not None and "pad_token" not in config:
        tokens["pad_token"] = core.padding["pad_token"]
    extra = config.get(_EXTRA)
    return tokens | (dict(extra) if isinstance(extra, dict) else {})


def _token(value: Any) -> Token | None:
    """A token from its representation in the files; None if the value is not a token."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    return value if isinstance(value, str | AddedToken) else None


def _extra(config: Mapping[str, Any]) -> list[Token]:
    listed = config[_EXTRA] if _EXTRA in config else config.get(_OLD_EXTRA)
    tokens = [] if isinstance(listed, dict) else [_token(value) for value in listed or ()]
    if None in tokens:
        raise NotPlain(f"{_EXTRA} has an item that is not a token")
    return [token for token in tokens if token is not None]


def _add(core: Core, added: Iterable[AddedToken], named: Sequence[Token], extra: Iterable[Token]) -> None:
    """Add the tokens that tokenizer.json lacks or has with other flags; marks special tokens of the vocabulary as special."""
    known = core.get_added_tokens_decoder().values()
    same, texts = {repr(token) for token in known}, {token.content for token in known}
    new: list[Token] = [token for token in added if repr(token) not in same]
    texts |= {str(token) for token in new}
    for token in (*named, *extra):
        if str(token) not in texts and token not in new:  # of duplicates with different flags, the later one counts
            new.append(token)
    names = set(map(str, named))
    tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in new]
    for token in tokens:
        token.special = token.special or token.content in names
    if tokens:
        core.add_tokens(tokens)


def _template(place: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template; a separate file overrides tokenizer_config.json."""
    file = place / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not isinstance(template, str | None) or (place / "additional_chat_templates").is_dir():
        raise NotPlain("several templates")
    return template
