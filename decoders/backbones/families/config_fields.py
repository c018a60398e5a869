"""Reads single fields of config.json. ValueError names the field, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Config = Mapping[str, Any]


@contextmanager
def fitting(family: str, *errors: type[Exception]) -> Iterator[None]:
    """Within the `with` block, a ValueError, or one of these errors, becomes a ValueError that names config.json and the
    family."""
    caught: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except caught as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model.path: config.json does not fit family {family!r}: {reason}") from error


def whole(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """Read a whole number >= `least`; a missing or null field is the default, if there is one."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"it has {key} = {value!r}; allowed: whole numbers >= {least}")
    return value


def positive(config: Config, key: str, default: float | None = None) -> float:
    """Read a number > 0; a missing or null field is the default, if there is one."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"it has {key} = {value!r}; allowed: numbers > 0")
    return float(value)


def flag(config: Config, key: str) -> bool:
    """Read true or false; a missing or null field is false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"it has {key} = {value!r}; allowed: true, false")
    return bool(value)


def wholes(config: Config, names: Mapping[str, str]) -> dict[str, int]:
    """Read whole numbers >= 1; `names` maps ours to config.json's."""
    return {ours: whole(config, theirs) for ours, theirs in names.items()}


def demand(config: Config, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if config.json has an unsupported value; a missing key stands for the first allowed value."""
    for key, allowed in supported.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"it has {key} = {value!r}; supported: {', '.join(map(repr, allowed))}")


def token_id(config: Config, key: str, default: int) -> int:
    """Read the id of a token; the default if it is missing or null; ValueError if it is not a number."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
    return value
