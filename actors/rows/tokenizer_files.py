"""Reads the files of a checkpoint's tokenizer like transformers does, without importing transformers or torch.

`tokenizer.json` is the tokenizer. The other files name the special tokens, may add tokens, and hold the chat template.
Source: `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend` in transformers;
tests/actors/rows/test_tokenizer_files.py compares the results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

Token = str | AddedToken

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
# Settings of tokenizer_config.json with which transformers changes the tokenizer by its own rules.
_NOT_OURS = ("fix_mistral_regex", "fast_tokenizer_files")


class NotPlain(Exception):
    """This module can't read the files; only transformers can, if at all."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer; its special tokens by name ({bos_token: <s>}), all in its vocabulary; its chat template, if it has one."""

    core: Core
    names: dict[str, str]
    template: str | None

    def id_of(self, name: str) -> int | None:
        """The id of a special token; None if the tokenizer has none of that name."""
        token = self.names.get(name)
        return None if token is None else self.core.token_to_id(token)


def read_files(place: Path) -> TokenizerFiles:
    """Read the tokenizer in a folder. Raises NotPlain, or whatever the libraries raise for a damaged file."""
    path = place / "tokenizer.json"
    if not path.is_file():
        raise NotPlain("no tokenizer.json")
    config = read_object(place / "tokenizer_config.json")
    if any(name in config for name in _NOT_OURS):
        raise NotPlain("settings that change the tokenizer")
    if _OLD_EXTRA in config and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_OLD_EXTRA)
    core = Core.from_file(str(path))
    added = _added(place, config, core)
    named = _named(config, core, {str(token): token for token in added})
    _add(core, added, list(named.values()), _extra(config))
    return TokenizerFiles(core, {name: str(token) for name, token in named.items()}, _template(place, config))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty if the file is missing; ValueError if it holds anything else."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def _added(place: Path, config: dict[str, Any], core: Core) -> list[AddedToken]:
    """The tokens that tokenizer_config.json or older files add, by id; names in older files are written to `config`."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        return [AddedToken(**listed[key]) for key in sorted(listed, key=int)]
    for key, value in read_object(place / "special_tokens_map.json").items():
        config[key] = [*_listed(config), *map(_as_special, value)] if key == _EXTRA else _as_special(value)
    special = {str(config[name]) for name in _NAMED if config.get(name)} | set(map(str, _listed(config)))
    older = read_object(place / "added_tokens.json")
    tokens = {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in older.items()
    }
    tokens |= core.get_added_tokens_decoder()
    return [tokens[number] for number in sorted(tokens)]


def _as_special(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return AddedToken(**{key: flag for key, flag in value.items() if key not in {"special", "__type"}}, special=True)


def _named(config: Mapping[str, Any], core: Core, added: Mapping[str, AddedToken]) -> dict[str, Token]:
    """The special tokens that have a name, the well-known ones first."""
    others = [name for name in config if name.endswith("_token") and name not in _NAMED]
    found: dict[str, Token] = {}
    for name in (*_NAMED, *others):
        token = _token(config.get(name))
        if token is not None:
            found[name] = added.get(str(token), token) if name in _NAMED else token
        elif name in _NAMED and config.get(name) is not None:
            raise NotPlain(f"{name} is not a token")
    if core.padding is not None and "pad_token" not in config:
        found["pad_token"] = core.padding["pad_token"]
    extra = config.get(_EXTRA)
    return found | (dict(extra) if isinstance(extra, dict) else {})


def _token(value: Any) -> Token | None:
    """A token from its representation in the files; None if the value is not a token."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    return value if isinstance(value, str | AddedToken) else None


def _extra(config: Mapping[str, Any]) -> list[Token]:
    """The special tokens without a name."""
    listed = config[_EXTRA] if _EXTRA in config else config.get(_OLD_EXTRA)
    found = [] if isinstance(listed, dict) else [_token(value) for value in listed or ()]
    if None in found:
        raise NotPlain(f"{_EXTRA} has an item that is not a token")
    return [token for token in found if token is not None]


def _listed(config: Mapping[str, Any]) -> list[Any]:
    listed = config.get(_EXTRA) or []
    return [] if isinstance(listed, dict) else list(listed)


def _add(core: Core, added: Iterable[AddedToken], named: Sequence[Token], extra: Iterable[Token]) -> None:
    """Add the tokens that tokenizer.json lacks or has with other flags; marks special tokens of the vocabulary as special."""
    held = core.get_added_tokens_decoder().values()
    same, texts = {repr(token) for token in held}, {token.content for token in held}
    new: list[Token] = [token for token in added if repr(token) not in same]
    texts |= {str(token) for token in new}
    for token in (*named, *extra):
        if str(token) not in texts and token not in new:  # of duplicates with different flags, the later one counts
            new.append(token)
    names, tokens = set(map(str, named)), [_special(token) for token in new]
    for token in tokens:
        token.special = token.special or token.content in names
    if tokens:
        core.add_tokens(tokens)


def _special(token: Token) -> AddedToken:
    return AddedToken(token, special=True) if isinstance(token, str) else token


def _template(place: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template; of several, the one named default. Separate files override tokenizer_config.json."""
    files = {file.stem: file for file in sorted(place.glob("additional_chat_templates/*.jinja"))}
    if (place / "chat_template.jinja").is_file():
        files = {"default": place / "chat_template.jinja"} | files
    held: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()} or config.get("chat_template")
    if isinstance(held, list):
        held = {one["name"]: one["template"] for one in held}
    if isinstance(held, dict):
        held = held.get("default")
    if held is not None and not isinstance(held, str):
        raise NotPlain("chat_template is not a text")
    return held
