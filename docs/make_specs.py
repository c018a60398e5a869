"""Writes the tables of docs/specs.md, metrics.md and watching.md, from the descriptions of the settings' fields.

python -m docs.make_specs

A page marks the place of a table by `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from draftmill.actors.metrics.settings import PassAtK
from draftmill.actors.task import (
    Chat,
    Columns,
    Complete,
    ConstraintSettings,
    Examples,
    Fim,
    Infill,
    Mask,
    Prompt,
    Score,
)
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.settings import DECODERS, decoders_for
from draftmill.jobs.config import sections
from draftmill.jobs.config.spec import JobSpec

PAGES: Final = tuple(Path(__file__).resolve().parent / name for name in ("specs.md", "metrics.md", "watching.md"))
REGION: Final = re.compile(r"(<!-- table: ([\w.]+) -->\n\n).*?(<!-- end -->)", re.DOTALL)
HEAD: Final = "| key | values (default) | meaning |\n|---|---|---|\n"


def keys(model: type[BaseModel]) -> str:
    """A row for each key of a section that has a description: `kind` and sections have none."""
    return HEAD + "".join(rows(model).values())


def decoder(kind: str) -> str:
    """The keys of a decoder; those that are the same in an earlier one's table are only named."""
    own = rows(DECODERS[kind])
    earlier = list(takewhile(lambda one: one != kind, DECODERS))
    for other in earlier:
        known = rows(DECODERS[other])
        shared = [name for name in own if own[name] == known.get(name)]
        if len(shared) > 2:
            rest = "".join(line for name, line in own.items() if name not in shared)
            return HEAD + row(", ".join(shared), "", f"as in {other}") + rest
    return HEAD + "".join(own.values())


def rows(model: type[BaseModel]) -> dict[str, str]:
    """The row of each key that has a description."""
    shapes = model.model_json_schema()["properties"]
    return {
        name: row(name, values(shapes[name], default(field)), field.description)
        for name, field in model.model_fields.items()
        if field.description is not None
    }


def kinds(union: Any) -> str:
    """A row for each class of a union that is told apart by `kind`."""
    head = "| kind | keys (default) | meaning |\n|---|---|---|\n"
    return head + "".join(row(kind_of(one), ", ".join(settings(one)) or "-", summary(one)) for one in classes(union))


def names(model: type[BaseModel]) -> str:
    """A row with the meaning of each key, where all have one type and no default."""
    head = "| key | the column holds |\n|---|---|\n"
    return head + "".join(row(name, field.description or "") for name, field in model.model_fields.items())


def tasks() -> str:
    """A row for each task, with its decoders."""
    head = "| kind | does | decoders |\n|---|---|---|\n"
    return head + "".join(
        row(kind_of(one), summary(one), ", ".join(decoders_for(kind_of(one)))) for one in (Infill, Complete, Score)
    )


def values(shape: Mapping[str, Any], preset: str) -> str:
    """The values of a key, with its default in brackets unless that is null or empty."""
    shown = {"required": ", required", "null": "", "[]": "", "{}": ""}.get(preset, f" ({preset})")
    return allowed(shape, preset) + shown


def settings(model: type[BaseModel]) -> Iterator[str]:
    """The keys of a class of a union, each with its default or its allowed values, the default first."""
    for name, field in model.model_fields.items():
        if name != "kind":
            shape = model.model_json_schema()["properties"][name]
            yield f"{name} ({', '.join(map(str, shape['enum'])) if 'enum' in shape else default(field)})"


def row(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def summary(model: type[BaseModel]) -> str:
    """The first paragraph of a class's docstring, without its full stop."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split()).removesuffix(".")


def classes(union: Any) -> tuple[type[BaseModel], ...]:
    """The classes of a union, with or without annotations."""
    inner = get_args(union)
    return inner if all(isinstance(one, type) for one in inner) else get_args(inner[0])


def kind_of(model: type[BaseModel]) -> str:
    """The `kind` of a class."""
    return str(get_args(model.model_fields["kind"].annotation)[0])


def default(field: FieldInfo) -> str:
    """A default as a spec writes it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"\w+", value):
        return f"`{json.dumps(value)}`"
    return str(value) if isinstance(value, str) else json.dumps(value).replace('"', "")


def allowed(shape: Mapping[str, Any], unset: str = "") -> str:
    """The values of a key in words, from its JSON Schema; null goes without saying where it is the default."""
    if "$ref" in shape or "oneOf" in shape:
        return "section"
    if "anyOf" in shape:
        kinds = dict.fromkeys(allowed(one) for one in shape["anyOf"])
        shown = [kind for kind in kinds if kind.removeprefix("list: ") == kind or kind[6:] not in kinds]
        many = ["or a list of them"] if len(shown) < len(kinds) else []
        return ", ".join(kind for kind in shown + many if (kind, unset) != ("null", "null"))
    if "enum" in shape or "const" in shape:
        return ", ".join(map(str, shape.get("enum", [shape.get("const")])))
    if shape["type"] == "array":
        return f"list: {allowed(shape['items'])}" if "items" in shape else "list"
    words = {"string": "text", "object": "mapping"}
    return " ".join([words.get(shape["type"], shape["type"]), *limits(shape)])


def limits(shape: Mapping[str, Any]) -> Sequence[str]:
    """The bounds of a number in words."""
    least, most, above = (shape.get(key) for key in ("minimum", "maximum", "exclusiveMinimum"))
    if least == -(2**63):
        return ["of 64 bits"]
    if least is not None and most is not None:
        return [f"{least:g}..{int(most)}"]
    signs = ((">=", least), (">", above), ("<=", most))
    bounds = [f"{sign} {bound:g}" for sign, bound in signs if bound is not None]
    return [", ".join(bounds)] if bounds else []


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "job": partial(keys, JobSpec),
    "task": partial(tasks),
    "task.infill": partial(keys, Infill),
    "task.infill.mask": partial(kinds, Mask),
    "task.infill.fim": partial(keys, Fim),
    "task.complete": partial(keys, Complete),
    "task.constraint": partial(keys, ConstraintSettings),
    "task.score": partial(keys, Score),
    "task.score.estimate": partial(keys, Estimate),
    "prompt": partial(keys, Prompt),
    "prompt.examples": partial(keys, Examples),
    "chat": partial(keys, Chat),
    "input": partial(keys, sections.InputSettings),
    "input.columns": partial(names, Columns),
    "model": partial(keys, sections.ModelSettings),
    "sampling": partial(keys, Sampling),
    "batching": partial(keys, sections.BatchingSettings),
    "workers": partial(keys, sections.WorkerShape),
    "errors": partial(keys, sections.ErrorSettings),
    "output": partial(keys, sections.OutputSettings),
    "s3": partial(keys, sections.S3Settings),
    "notify": partial(keys, sections.NotifySettings),
    "decoder.speculative.drafter": partial(kinds, DECODERS["speculative"].model_fields["drafter"].annotation),
    "decoder.s2d2.router": partial(kinds, DECODERS["s2d2"].model_fields["router"].annotation),
    "decoder.s2d2.estimator": partial(kinds, DECODERS["s2d2"].model_fields["estimator"].annotation),
    "metrics.pass_at_k": partial(keys, PassAtK),
} | {f"decoder.{kind}": partial(decoder, kind) for kind, one in DECODERS.items() if len(one.model_fields) > 1}


def filled(page: str) -> str:
    """A page with its tables as they should be; ValueError where a table's region has no end of its own."""
    if page.count("<!-- table: ") != page.count("<!-- end -->"):
        raise ValueError("a page has other numbers of `<!-- table: NAME -->` and `<!-- end -->`")
    return REGION.sub(lambda region: region[1] + TABLES[region[2]]() + "\n" + region[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
