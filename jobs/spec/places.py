"""What may stand where a spec names a place: a local path, or a URL of the few kinds that are read or written there. Pure.

A message never repeats a URL that is refused: people paste signed ones, and passwords in front of an @.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from storage.inputs.inputs import expanded, glob_pattern

MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
"""What Linux takes; beyond it the system's calls fail in ways of their own."""

SCHEMES: dict[str, tuple[str, ...]] = {
    "input.path": ("s3", "hf"),
    "model.path": ("s3",),
    "model.adapter": ("s3",),
    "model.tokenizer": (),
    "decoder.head": (),
    "decoder.drafter.path": ("s3",),
    "output.path": ("s3", "memory"),
}
"""The kinds of URL that each key takes, besides local paths (and `builtin:`, which is none)."""


_WILD = re.compile(r"[*?\[]")


def place_problem(data: Any) -> str | None:
    """The first place in a spec (a JobSpec) that can't be one, led by its key; None if all are fine."""
    for key, value in _places(data):
        problem = path_problem(value, SCHEMES[key.rstrip(".0123456789")])
        if problem:
            return f"{key}: {problem}"
    for path in [data.input.path] if isinstance(data.input.path, str) else data.input.path:
        if among_inputs(path, data.output.path):
            return f"output.path: {data.output.path!r} lies among the inputs, {path!r}; choose a place outside of them"
    return None


def path_problem(path: str, schemes: tuple[str, ...]) -> str | None:
    """What is wrong with a path or URL; None where nothing is."""
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return f"{path[:80]!r} has control characters"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        return f"'{path[:40]}...' is longer than a path can be"
    scheme, separator, rest = path.partition("://")
    if separator and "@" in rest.partition("/")[0]:
        return "no credentials in a URL; they come from the environment"
    if separator and scheme not in schemes:
        allowed = ", ".join(["a local path", *(f"{name}://..." for name in schemes)])
        return f"{scheme[:40]}:// is not allowed; allowed: {allowed}"
    return None


def among_inputs(inputs: str, output: str) -> bool:
    """Whether a run at `output` would find its own result files at `inputs`: a folder around it, or a glob that matches them.

    Going on with the job would then be refused, since its inputs have changed.
    """
    if inputs.startswith(("builtin:", "hf://")) or ("://" in inputs) != ("://" in output):
        return False
    if len(alternatives := expanded(inputs)) > 1:
        return any(among_inputs(one, output) for one in alternatives)
    inputs, output = _absolute(inputs), _absolute(output)
    if _WILD.search(inputs):
        return glob_pattern(inputs).fullmatch(f"{output}/data/unit-00000000.parquet") is not None
    return f"{output}/".startswith(f"{inputs.rstrip('/')}/")


def _absolute(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.abspath(os.path.expanduser(path))


def _places(data: Any) -> Iterator[tuple[str, str]]:
    for key in SCHEMES:
        value = data
        for name in key.split("."):
            value = getattr(value, name, None)
        if isinstance(value, str):
            yield key, value
        if isinstance(value, tuple):
            yield from ((f"{key}.{index}", one) for index, one in enumerate(value))
