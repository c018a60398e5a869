"""Checks the paths and URLs in a spec: local paths, and the URL schemes that each key allows. Pure.

A message never repeats a rejected URL: users may paste signed URLs, or passwords before an @.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from draftmill.jobs.spec.dated_path import EXAMPLE, date_problem, with_date
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import expand_braces, glob_pattern
from draftmill.storage.stores.interface import is_local

MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
"""Linux's limits; the error messages of longer paths would be confusing."""

SCHEMES: dict[str, tuple[str, ...]] = {
    "input.path": ("s3", "hf"),
    "input.run": ("s3",),
    "prompt.examples.path": ("s3", "hf"),
    "model.path": ("s3",),
    "model.adapter": ("s3",),
    "model.tokenizer": (),
    "decoder.head": (),
    "decoder.drafter.path": ("s3",),
    "output.path": ("s3", "memory"),
}
"""The URL schemes that each key allows, besides local paths (`builtin:` is not a URL)."""


def place_problem(data: Any) -> str | None:
    """The first problem with a path in a spec (a JobSpec), starting with its key; None if all are valid."""
    for key, value in places_of(data):
        problem = path_problem(value, SCHEMES[key.rstrip(".0123456789")])
        if problem:
            return f"{key}: {problem}"
    if problem := date_problem(data.output.path):
        return f"output.path: {problem}"
    output = with_date(data.output.path, EXAMPLE)
    for path in data.input.paths:
        if among_inputs(path, output):
            return f"output.path: {data.output.path!r} is inside the inputs, {path!r}; choose a path outside of them"
    return None


def check_places(data: Any) -> None:
    """Raise UserError for the first problem with a path in a spec (a JobSpec) whose dates are filled in."""
    if problem := place_problem(data):
        field, _, message = problem.partition(": ")
        raise UserError(message, field=field)


def path_problem(path: str, schemes: tuple[str, ...]) -> str | None:
    """The problem with a path or URL; None if it is valid."""
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
    """Whether a run at `output` would read its own result files as inputs: `inputs` is a parent folder or a matching glob.

    Resuming such a job would fail, since its inputs would have changed.
    """
    if inputs.startswith(("builtin:", "hf://")) or is_local(inputs) != is_local(output):
        return False
    if len(alternatives := expand_braces(inputs)) > 1:
        return any(among_inputs(alternative, output) for alternative in alternatives)
    inputs, output = _absolute(inputs), _absolute(output)
    results = f"{output}/data/unit-00000000.parquet"
    return is_inside(output, inputs) or glob_pattern(inputs).fullmatch(results) is not None


def is_inside(path: str, folder: str) -> bool:
    """Whether a path or URL is the folder itself or below it; both are absolute and normal."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if is_local(path) else path.rstrip("/")


def places_of(data: Any) -> Iterator[tuple[str, str]]:
    for key in SCHEMES:
        value = data
        for name in key.split("."):
            value = getattr(value, name, None)
        if isinstance(value, str):
            yield key, value
        if isinstance(value, tuple):
            yield from ((f"{key}.{index}", path) for index, path in enumerate(value))
