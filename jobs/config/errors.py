"""Messages for errors in a spec: the field's path, the value, what is allowed, and the nearest known key.

Turns the locations of pydantic's errors, which also name union members, into paths of the user's file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from draftmill.storage.errors import UserError

MOST = 5
"""Number of problems shown; the rest are only counted."""

_LED_BY_PATH = re.compile(r"^(?:[a-z0-9_]+(?:\.[a-z0-9_]+)+): ")
# The characters shown of a value; and a quoted text that is too long to be anything but a value.
_LONGEST: Final = 80
_QUOTED: Final = re.compile(r"'[^']{200,}'|\"[^\"]{200,}\"")
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "a length of at least", "pattern": "of the form"}


def spec_error(
    model: type[BaseModel], data: Mapping[str, Any], error: ValidationError, changed: Iterable[tuple[str, Any]] = ()
) -> UserError:
    """Return a UserError that names every problem, one line per key.

    Of the dotted keys that were `changed`, a `kind` may have left the settings of another kind in its section: a last line says
    how to drop them.
    """
    errors: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_path(item, data), []).append(item)
    problems = [_problem(model, path, items) for path, items in _without_consequences(errors).items()]
    if len(problems) > MOST:
        problems = [*problems[:MOST], ("", f"and {len(problems) - MOST} more problems")]
    lines = [f"{path}: {text}" if path else text for path, text in problems[1:]]
    for section, kind in ((key.removesuffix(".kind"), kind) for key, kind in changed if key.endswith(".kind")):
        if any(path.startswith(f"{section}.") and path != f"{section}.kind" for path, _ in problems):
            lines.append(f"settings of the old kind go if the whole section is changed: {section}={{kind: {kind}}}")
    return UserError("\n".join([problems[0][1], *lines]), field=problems[0][0] or None)


def _path(item: Any, data: Any) -> str:
    """The location without the names of union members, which are not keys of the user's file."""
    keys: list[str] = []
    last = len(item["loc"]) - 1
    for index, key in enumerate(item["loc"]):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list | tuple) and isinstance(key, int):
            data = data[key] if key < len(data) else None
        elif not (item["type"] == "missing" and index == last):
            continue
        keys.append(str(key))
    if item["type"].startswith("union_tag"):
        keys.append("kind")
    return ".".join(keys)


def _without_consequences(errors: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Drop that a mapping is not a number, or a word such as `auto`, if keys of this mapping are wrong."""
    return {
        path: items
        for path, items in errors.items()
        if any(item["type"] not in _OF_WORDS or not isinstance(item["input"], Mapping) for item in items)
        or not any(other.startswith(f"{path}.") for other in errors)
    }


_OF_WORDS: Final = ("literal_error", "int_type")


def _problem(model: type[BaseModel], path: str, items: list[Any]) -> tuple[str, str]:
    # Of the members of a union, one that knows the value's form says what is wrong with it.
    item = next(
        (each for each in items if each["type"] == "value_error" and isinstance(each["input"], Mapping)), items[0]
    )
    match item["type"]:
        case "extra_forbidden":
            return path, _unknown(model, item["loc"], path)
        case "missing":
            return path, "missing"
        case "union_tag_not_found":
            kinds = (kind for models in _models_at(model, item["loc"]) for kind in _kind_of(models))
            return path, f"missing; allowed: {', '.join(kinds)}"
        case "union_tag_invalid":
            tag, tags = _short(repr(item["ctx"]["tag"])), item["ctx"]["expected_tags"].replace("'", "")
            return path, f"{tag} is not known; allowed: {tags}"
        case "value_error":
            return _own_words(path, str(item["ctx"]["error"]))
    value = f"{item['input']!r}" if path.partition(".")[0] != "s3" else "the value"  # not shown: it may be a secret key
    allowed = " or ".join(dict.fromkeys(map(_range, items)))
    return path, f"{_short(value)} is not allowed; allowed: {allowed}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _own_words(path: str, message: str) -> tuple[str, str]:
    """Split the path from a message of our own validators, if it starts with one, and shorten long quoted values."""
    message = _QUOTED.sub(lambda quoted: _short(quoted[0]), message)
    led = _LED_BY_PATH.match(message)
    return (led[0][:-2], message[led.end() :]) if led else (path, message)


def _range(item: Any) -> str:
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"]).replace("'", "")
    context = item.get("ctx", {})
    bounds = [f"{words} {context[name]}" for name, words in _BOUNDS.items() if name in context]
    return ", ".join(bounds) or _TYPES.get(item["type"], item["msg"])


ELSEWHERE = {
    "chat_template_kwargs": "chat.template_kwargs",
    "system_prompt": "prompt.system",
    "system": "prompt.system",
}
"""Keys of other software that have another name here."""


def _unknown(model: type[BaseModel], location: Sequence[Any], path: str) -> str:
    name, section = str(location[-1]), path.rpartition(".")[0]
    known = [key for section_model in _models_at(model, location[:-1]) for key in section_model.model_fields]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    elsewhere = [dotted for dotted in all_keys(model) if dotted.rpartition(".")[2] == name and dotted != path]
    nearest = near or ([ELSEWHERE[name]] if name in ELSEWHERE else elsewhere)
    hint = ""
    if nearest:
        suggestion = nearest[0] if nearest[0] not in known else ".".join(filter(None, [section, nearest[0]]))
        hint = f" did you mean {suggestion}?"
    return f"unknown key;{hint} known {f'under {section}' if section else 'keys'}: {', '.join(known)}"


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model and of the models inside it."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _models_in(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")


def _models_at(model: type[BaseModel], location: Sequence[Any]) -> list[type[BaseModel]]:
    """The models that are possible at a location: a key leads to its field's models, a union member's name selects one."""
    models = [model]
    for key in location:
        annotations = [parent.model_fields[key].annotation for parent in models if key in parent.model_fields]
        inner = [child for annotation in annotations for child in _models_in(annotation)]
        models = inner or [member for member in models if key in _kind_of(member)] or models
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return list(dict.fromkeys(member for part in get_args(annotation) for member in _models_in(part)))


def _kind_of(model: type[BaseModel]) -> tuple[str, ...]:
    kind = model.model_fields.get("kind")
    return () if kind is None else tuple(part for part in get_args(kind.annotation) if isinstance(part, str))
