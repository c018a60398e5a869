"""Reads single fields of a config.json, and refuses by name what is missing, wrong or not built. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def numbers(config: Mapping[str, Any], names: Mapping[str, str], family: str) -> dict[str, int]:
    """Read whole numbers >= 1; `names` maps ours to config.json's. ValueError names the first that is missing or none."""
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
    """Raise ValueError where config.json asks for what is not built; a missing key stands for the first allowed value."""
    for key, allowed in wanted.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"it has {key} = {value!r}; supported: {', '.join(map(repr, allowed))}")


def token_id(config: Mapping[str, Any], key: str, default: int) -> int:
    """Read the id of a token, the default where there is none or null; ValueError where it is no number."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
    return value
