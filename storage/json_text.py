"""JSON from files: whatever is wrong with a text, or with the shape of what it holds, is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads`; ValueError also for nesting deeper than Python's parser can follow."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty if the file is missing; ValueError if it holds anything else."""
    if not path.is_file():
        return {}
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def parse_as(kind: type[T], text: str | bytes) -> T:
    """JSON text as a dataclass, or as another type with annotations; ValueError, with the key, for any other shape."""
    return shaped(kind, parse_json(text))


def shaped(kind: type[T], value: Any) -> T:
    """The same for JSON that is parsed already."""
    try:
        found: T = _adapter(cast(Hashable, kind)).validate_python(value)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}: {first['msg']}" if key else first["msg"]) from None


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, kind))
    return adapter
