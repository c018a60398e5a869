"""Reads single fields of a config.json; errors name a field that is missing, invalid or unsupported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def numbers(config: Mapping[str, Any], names: Mapping[str, str], family: str) -> dict[str, int]:
    """Read whole numbers >= 1; `names` maps ours to config.json's. ValueError names the first missing or invalid one."""
    found = {}
    for ours, theirs in names.items():
        value = config.get(theirs)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"model.path: config.json of family {family!r} has {theirs} = {value!r}; allowed: whole numbers >= 1"
            )
        found[ours] = value
    return found


def demand(config: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if config.json has an unsupported value; a missing key stands for the first allowed value."""
    for key, allowed in wanted.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"it has {key} = {value!r}; supported: {', '.join(map(repr, allowed))}")


def token_id(config: Mapping[str, Any], key: str, default: int) -> int:
    """Read the id of a token; the default if it is missing or null; ValueError if it is not a number."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
    return value
