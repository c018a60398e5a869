"""Reads YAML or JSON into a plain mapping and applies `a.b=VALUE` overrides to it. Knows none of the spec's keys."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from draftmill.storage.errors import UserError

MAX_BYTES = 4 * 2**20
MAX_INT_BITS = 1024
"""Keys need at most 64 bits; Python refuses to print numbers of several thousand digits, even in error messages."""


class _Loader(yaml.SafeLoader):
    """The safe loader; in addition, rejects duplicate keys, reads 1e-3 as a number, and the key `on` as text."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool" and key.value.lower() not in {"true", "false"}:  # `on:` of YAML 1.1
                key.tag = "tag:yaml.org,2002:str"
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} occurs twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = int(super().construct_yaml_int(node))
        if value.bit_length() > MAX_INT_BITS:
            raise yaml.constructor.ConstructorError(None, None, "a number is too long", node.start_mark)
        return value

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        value = str(super().construct_yaml_str(node))
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise yaml.constructor.ConstructorError(
                None, None, "text has half of a UTF-16 surrogate pair", node.start_mark
            )
        return value


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

# YAML 1.1 requires a dot in every float, so it reads 1e-3 as a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_mapping(path: Path, what: str = "spec") -> dict[str, Any]:
    """Return the mapping in a YAML file, which messages call `what`; UserError if it is missing, not YAML, or not a mapping."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise UserError(f"{what} {path}: larger than {MAX_BYTES // 2**20} MiB, the maximum")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path}: not UTF-8: {error}") from None
    data = parse(text, f"{what} {path}")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kind = "keys that are not strings" if isinstance(data, dict) else type(data).__name__ if data else "nothing"
        raise UserError(f"{what} {path}: must be a mapping of keys to values, but it has {kind}")
    return data


def read_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """The dotted key and the value of each KEY=VALUE; VALUE is read as YAML. Raises UserError without '='."""
    read = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.strip().split(".")):
            raise UserError(f"--set {override!r}: write KEY=VALUE, for example decoder.k=4")
        read.append((dotted.strip(), parse(text, f"--set {override!r}")))
    return read


def apply_changes(data: dict[str, Any], changes: Iterable[tuple[str, Any]]) -> None:
    """Set dotted keys in place, one after another; UserError if the parent of one is not a mapping."""
    for dotted, value in changes:
        inner, keys = data, dotted.split(".")
        for index, key in enumerate(keys[:-1]):
            if key == "decoder" and isinstance(inner.get(key), str):  # its kind alone
                inner[key] = {"kind": inner[key]}
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UserError(
                    f"{inner!r} is not a mapping, so {dotted} can't be set", field=".".join(keys[: index + 1])
                )
        inner[keys[-1]] = value


def parse(text: str, what: str) -> Any:
    """The data in a YAML or JSON text; UserError, whose message `what` begins, if it is neither."""
    with suppress(ValueError, RecursionError):  # the YAML loader says what is wrong, and where
        return _read_json(text.removeprefix("\ufeff"))
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: not YAML: {_reason(error)}") from None
    except (KeyError, AttributeError, TypeError):  # PyYAML's errors for a value that does not match its tag
        raise UserError(f"{what}: not YAML: a value does not fit its tag") from None


def _read_json(text: str) -> Any:
    """The data in a JSON object; ValueError for anything else. JSON escapes an emoji as two halves, which YAML refuses."""
    if not text.lstrip().startswith("{"):
        raise ValueError("no object")
    data = json.loads(text, object_pairs_hook=_unique, parse_int=_short_int, parse_constant=_short_int)
    json.dumps(data, ensure_ascii=False).encode("utf-8")  # half of a UTF-16 pair: UnicodeEncodeError
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _short_int(text: str) -> int:
    if len(text) > 300 or int(text).bit_length() > MAX_INT_BITS:
        raise ValueError("a number is too long")
    return int(text)


def _reason(error: Exception) -> str:
    """The problem and its place, without the lines around it, which may contain secrets."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        said = " ".join(filter(None, [error.context, error.problem]))
        return f"line {mark.line + 1}, column {mark.column + 1}: {said}"
    return " ".join(str(error).split())
