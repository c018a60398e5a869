"""Reads single fields of config.json. ValueError names the field, its value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Config = Mapping[str, Any]
Supported = Mapping[str, tuple[Any, ...]]
"""Supported values of fields, the default first."""


@contextmanager
def refused(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Within the `with` block, these errors become a ValueError that begins with `problem`."""
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())
        is_plain = reason and isinstance(error, ValueError | RuntimeError)
        raise ValueError(f"{problem}: {reason if is_plain else f'{type(error).__name__}: {reason}'}") from error


def fitting(family: str, *errors: type[Exception]) -> AbstractContextManager[None]:
    """As `refused`, for ValueError and these errors, with a message that names config.json and the family."""
    return refused(f"model.path: config.json does not fit family {family!r}", ValueError, *errors)


def whole(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """Read a whole number >= `least`; a missing or null field is the default, if there is one."""
    allowed = f"whole numbers >= {least}"
    return _read(config, key, default, lambda value: type(value) is int and value >= least, allowed)


def positive(config: Config, key: str, default: float | None = None) -> float:
    """Read a number > 0; a missing or null field is the default, if there is one."""
    return float(_read(config, key, default, lambda value: type(value) in {int, float} and value > 0, "numbers > 0"))


def flag(config: Config, key: str) -> bool:
    """Read true or false; a missing or null field is false."""
    return bool(_read(config, key, False, lambda value: type(value) is bool, "true, false"))


def _read(config: Config, key: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
    value = default if config.get(key) is None else config[key]
    if not fits(value):
        raise ValueError(f"it has {key} = {word(value)}; allowed: {allowed}")
    return value


def demand(config: Config, supported: Supported) -> None:
    """Raise ValueError if config.json has an unsupported value; a missing field has the first supported value."""
    for key, allowed in supported.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"it has {key} = {word(value)}; supported: {', '.join(dict.fromkeys(map(word, allowed)))}")


def word(value: Any) -> str:
    """A value as its file has it; `none` for nothing and for an empty object or list."""
    return repr(value) if isinstance(value, str) else "none" if value in (None, {}, []) else json.dumps(value)
