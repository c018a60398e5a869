"""The paths and URLs in a spec: all of them, and checks of each.

A message never repeats a rejected URL: users may paste signed URLs, or passwords before an @.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from draftmill.decoders.common_settings import PathMark
from draftmill.jobs.config.dates import EXAMPLE, date_problem, given_problem, with_date
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import expand_braces, glob_pattern
from draftmill.storage.stores.store import is_local

MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
"""Linux's limits; the error messages of longer paths would be confusing."""


def place_problem(data: Any) -> str | None:
    """The first problem with a path in a spec (a JobSpec), starting with its key; None if all are valid."""
    for found in places_of(data):
        if problem := path_problem(found.value, found.mark.schemes, found.mark.reason):
            return f"{found.key}: {problem}"
    if problem := date_problem(data.output.path):
        return f"output.path: {problem}"
    for found in (*places_of(data.input, "input"), *places_of(data.decoder, "decoder")):
        if problem := given_problem(found.value, data.output.path):
            return f"{found.key}: {problem}"
    output = with_date(data.output.path, EXAMPLE)
    for path in data.input.paths:
        if among_inputs(with_date(path, EXAMPLE), output):
            return f"output.path: {data.output.path!r} is inside the inputs, {path!r}; choose a path outside of them"
    return None


def check_places(data: Any) -> None:
    """Raise UserError for the first problem with a path in a spec (a JobSpec) whose dates are filled in."""
    if problem := place_problem(data):
        field, _, message = problem.partition(": ")
        raise UserError(message, field=field)


def path_problem(path: str, schemes: tuple[str, ...], reason: str = "") -> str | None:
    """The problem with a path or URL; None if it is valid. `reason` is why only these schemes are allowed."""
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return f"{path[:80]!r} has control characters"
    if len(path.encode()) > MAX_PATH_BYTES or any(len(name.encode()) > MAX_NAME_BYTES for name in path.split("/")):
        return f"'{path[:40]}...' is longer than a path can be"
    scheme, separator, rest = path.partition("://")
    if separator and "@" in rest.partition("/")[0]:
        return "no credentials in a URL; they come from the environment"
    if separator and scheme not in schemes:
        allowed = ", ".join(["a local path", *(f"{name}://..." for name in schemes)])
        return f"{scheme[:40]}:// is not allowed; allowed: {allowed}{reason}"
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


@dataclass(frozen=True, slots=True)
class FoundPlace:
    """A path or URL in a spec: its keys, each of a mapping or the number of a list's item, and its value."""

    keys: tuple[str | int, ...]
    value: str
    mark: PathMark

    @property
    def key(self) -> str:
        """The keys as messages show them."""
        return ".".join(map(str, self.keys))

    @property
    def is_here(self) -> bool:
        """Whether it is a path of this machine, and neither a builtin model or input nor, as far as can be seen, a hub's id."""
        if not is_local(self.value) or self.value.startswith("builtin:"):
            return False
        return not self.mark.is_model or not HUB_ID.fullmatch(self.value) or os.path.exists(self.value)


HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.gguf)|\w[\w.-]*/\w[\w.-]*/\w[\w.-]*\.gguf", re.ASCII)
"""A model id of the hub, ORG/NAME or NAME, or a GGUF file in one."""


def places_of(data: Any, *keys: str | int) -> Iterator[FoundPlace]:
    """Every path and URL in settings: the values of all fields that are marked with a PathMark, at any depth."""
    if isinstance(data, BaseModel):
        for name, field in type(data).model_fields.items():
            value = getattr(data, name)
            mark = next((item for item in field.metadata if isinstance(item, PathMark)), None)
            if mark is None:
                yield from places_of(value, *keys, name)
            elif isinstance(value, str | tuple):
                several = (
                    {(*keys, name): value}
                    if isinstance(value, str)
                    else {(*keys, name, n): v for n, v in enumerate(value)}
                )
                yield from (
                    FoundPlace(at, path, mark) for at, path in several.items() if not re.fullmatch(mark.other, path)
                )
    elif isinstance(data, tuple | Mapping):
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from places_of(value, *keys, key)


Given = TypeVar("Given", bound=BaseModel)


def with_places(settings: Given, change: Callable[[FoundPlace], str]) -> Given:
    """The settings with other values for their paths and URLs."""
    for found in places_of(settings):
        settings = _with(settings, found.keys, change(found))
    return settings


def with_absolute(settings: Given) -> Given:
    """The settings with absolute paths where they are paths of this machine: a worker may have another working directory."""
    return with_places(settings, lambda found: absolute(found.value) if found.is_here else found.value)


def _with(settings: Any, keys: Sequence[str | int], value: str) -> Any:
    if not keys:
        return value
    name, *inner = keys
    if isinstance(name, int):
        return (*settings[:name], _with(settings[name], inner, value), *settings[name + 1 :])
    return settings.model_copy(update={name: _with(getattr(settings, name), inner, value)})


def absolute(path: str) -> str:
    """A local path made absolute; URLs stay unchanged."""
    return str(Path(path).expanduser().absolute()) if is_local(path) else path
