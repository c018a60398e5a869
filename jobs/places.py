"""What may stand where a spec names a place: a local path, or a URL of the few kinds that are read or written there. Pure.

A message never repeats a URL that is refused: people paste signed ones, and passwords in front of an @.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
"""What Linux takes; beyond it the system's calls fail in ways of their own."""

SCHEMES: dict[str, tuple[str, ...]] = {
    "input.path": ("s3", "hf"),
    "model.path": ("s3",),
    "model.tokenizer": (),
    "decoder.head": (),
    "decoder.drafter.path": ("s3",),
    "output.path": ("s3", "memory"),
}
"""The kinds of URL that each key takes, besides local paths (and `builtin:`, which is none)."""


def place_problem(data: Any) -> str | None:
    """The first place in a spec (a pydantic model or a part of one) that can't be one, led by its key; None if all are fine."""
    for key, value in _places(data):
        problem = path_problem(value, SCHEMES[key])
        if problem:
            return f"{key}: {problem}"
    return None


def path_problem(path: str, schemes: tuple[str, ...]) -> str | None:
    """What is wrong with a path or URL; None where nothing is."""
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return f"{path[:80]!r} has control characters"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        return f"'{path[:40]}...' is longer than a path can be"
    scheme, separator, rest = path.partition("://")
    if separator and "@" in rest.partition("/")[0]:
        return "no credentials in the spec; they come from the environment"
    if separator and scheme not in schemes:
        allowed = ", ".join(["a local path", *(f"{name}://..." for name in schemes)])
        return f"{scheme[:40]}:// is not allowed; allowed: {allowed}"
    return None


def _places(data: Any) -> Iterator[tuple[str, str]]:
    for key in SCHEMES:
        value = data
        for name in key.split("."):
            value = getattr(value, name, None)
        if isinstance(value, str):
            yield key, value
