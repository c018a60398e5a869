"""The sweep file: a base job and the cases that differ from it, named or as a grid; checked before anything is loaded.

    base: job.yaml                      # or the job itself
    cases:                              # or grid: {decoder.k: [2, 4], sampling.temperature: [0, 0.7]}
      sequential: {decoder: {kind: any_subset}}
      drafts: {decoder.k: 4}
    output: {path: runs/sweep}

docs/sweeps.md explains each key.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from draftmill.actors.metrics.settings import Metrics
from draftmill.decoders.common_settings import Settings
from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.errors import spec_error
from draftmill.jobs.config.paths import path_problem
from draftmill.jobs.config.sections import Name
from draftmill.jobs.config.spec import SCHEMA_URL, JobSpec, check_spec, json_schema
from draftmill.jobs.config.yaml_file import apply_changes, read_mapping, read_overrides
from draftmill.storage.errors import UserError

MOST_CASES: Final = 1000
LONGEST_NAME: Final = 100
CASES: Final = "cases"
"""The folder of the cases in a sweep's directory."""
RECORD: Final = "sweep.json"
"""The list of the cases in a sweep's directory."""

_SAFE_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{,{LONGEST_NAME - 1}}}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def _dotted(key: str) -> str:
    if not all(key.split(".")):
        raise ValueError(f"{key!r} is not a dotted key of the job, such as decoder.k")
    if key in {"output", "output.path"}:
        raise ValueError(
            f"every case's results are in its own folder, {CASES}/NAME of the sweep's output.path; leave it out"
        )
    return key


def _safe_names(cases: Mapping[str, Any]) -> Mapping[str, Any]:
    seen: dict[str, str] = {}
    for name in cases:
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(
                f"the name {name!r} is not safe as a folder's name; allowed: up to {LONGEST_NAME} of the characters "
                "A-Z a-z 0-9 . _ + -, of which the first is a letter or a digit"
            )
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise ValueError(f"the names {other!r} and {name!r} are the same folder where case does not matter")
    return cases


def _different(values: list[Any]) -> list[Any]:
    for number, value in enumerate(values):
        if any(_same(value, other) for other in values[:number]):
            raise ValueError(f"{value!r} occurs twice")
    return values


def _place(path: str) -> str:
    problem = path_problem(path, ("s3", "memory"))
    if problem is None and has_date(path):
        problem = f"{path!r} has a date, which only `draftmill run` fills in"
    if problem:
        raise ValueError(problem)
    return path


Key = Annotated[str, AfterValidator(_dotted)]


class SweepOutput(Settings):
    """Where the results go."""

    path: Annotated[str, Field(min_length=1), AfterValidator(_place)] = Field(
        description="a folder or s3://bucket/prefix; each case is below it, in cases/NAME"
    )


class SweepFile(Settings):
    """Jobs that differ in a few settings."""

    name: Name | None = Field(default=None, description="in tables; else the file's name")
    base: str | dict[str, Any] = Field(description="a spec, or the path of one")
    cases: Annotated[dict[str, dict[Key, Any] | None], Field(min_length=1), AfterValidator(_safe_names)] | None = Field(
        default=None, description="the changes of each case: dotted keys of the job with other values, decoder.k: 4"
    )
    grid: (
        Annotated[dict[Key, Annotated[list[Any], Field(min_length=1), AfterValidator(_different)]], Field(min_length=1)]
        | None
    ) = Field(default=None, description="dotted keys with lists of values; every combination is a case")
    metrics: Metrics | None = Field(default=None, description="what is measured after the last case")
    output: SweepOutput

    @model_validator(mode="after")
    def _some_cases(self) -> SweepFile:
        if (self.cases is None) == (self.grid is None):
            problem = "both are missing" if self.cases is None else "both are there"
            raise ValueError(f"cases: {problem}; allowed: one of cases and grid")
        for key, count in {
            "cases": len(self.cases or ()),
            "grid": math.prod(map(len, (self.grid or {}).values())),
        }.items():
            if count > MOST_CASES:
                raise ValueError(f"{key}: {count:,} cases are too many; allowed: at most {MOST_CASES:,}")
        return self


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """One job of a sweep: the dotted keys in which it differs from the base, and its spec, or what is wrong with it."""

    name: str
    changes: Mapping[str, Any]
    spec: JobSpec | None
    error: UserError | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file; `path` is the sweep's directory. Cases are in the file's order; at least one."""

    name: str
    path: str
    cases: tuple[CaseSpec, ...]


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file, apply `a.b=VALUE` overrides and check every case.

    An override sets a key of the base job; `output.path` and `metrics` are the sweep's own. Raises UserError for a problem of
    the file as a whole. A problem of one case is that case's `error`.
    """
    data = read_mapping(Path(path))
    changed, own = read_overrides(overrides), {"name", "output.path"}
    apply_changes(data, (change for change in changed if change[0] in own))
    for key in data.keys() - SweepFile.model_fields.keys() & JobSpec.model_fields.keys():
        raise UserError(f"unknown key; did you mean base.{key}? keys of the job are under base", field=key)
    try:
        sweep = SweepFile.model_validate(data, strict=True)
    except ValidationError as error:
        raise spec_error(SweepFile, data, error) from None
    base = _base(sweep.base, Path(path)) | ({} if sweep.metrics is None else {"metrics": data["metrics"]})
    changes = _grid(sweep.grid) if sweep.cases is None else {name: case or {} for name, case in sweep.cases.items()}
    of_base = [(key.removeprefix("base."), value) for key, value in changed if key not in own]
    for key, _ in of_base:
        _check_not_varied(key, changes)
    apply_changes(base, of_base)
    name, place = sweep.name or Path(path).stem, sweep.output.path.rstrip("/")
    cases = [_case(case, changes[case], base, f"{name}/{case}", f"{place}/{CASES}/{case}") for case in changes]
    return Sweep(name, sweep.output.path, tuple(cases))


def sweep_schema() -> dict[str, Any]:
    """The JSON Schema of a sweep file. The base may lack any key but a `kind`, since the cases may have it."""
    schema, job = SweepFile.model_json_schema(), JobSpec.model_json_schema()
    schema["$defs"] |= {name: _without_required(part) for name, part in job.pop("$defs").items()}
    schema["properties"]["base"]["anyOf"] = [{"type": "string"}, _without_required(job)]
    kinds = [{"required": ["cases"]}, {"required": ["grid"]}]
    return {"$schema": SCHEMA_URL, **schema, "oneOf": kinds}


def print_schema(schema: str) -> int:
    """Print the JSON Schema of a `job` or a `sweep`, from which an editor completes keys; returns the exit code."""
    print(json.dumps(sweep_schema() if schema == "sweep" else json_schema(), indent=2, ensure_ascii=False))
    return 0


def _without_required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a mapping that may lack its keys, but for the `kind` that tells it from others."""
    kept = [key for key in schema.get("required", ()) if key == "kind"]
    rest = {key: value for key, value in schema.items() if key != "required"}
    return rest | ({"required": kept} if kept else {})


def _base(base: str | dict[str, Any], file: Path) -> dict[str, Any]:
    """The base job as a mapping; a path is relative to the working directory, or else to the sweep file's folder."""
    if not isinstance(base, str):
        return base
    path = Path(base).expanduser()
    near = file.parent / path
    return read_mapping(near if near.is_file() and not path.is_file() else path)


# ---- the cases


def _grid(grid: Any) -> dict[str, dict[str, Any]]:
    """One case for every combination of the values; the first key varies slowest."""
    labels = _labels(list(grid))
    texts = [_unique([f"{labels[key]}-{_short(value)}" for value in values]) for key, values in grid.items()]
    names = _unique([_fitting("_".join(picked)) for picked in product(*texts)])
    cases = (dict(zip(grid, picked, strict=True)) for picked in product(*grid.values()))
    return dict(zip(names, cases, strict=True))


def _same(one: Any, other: Any) -> bool:
    """Equal, and not 1 and true."""
    return type(one) is type(other) and bool(one == other)


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """A short name for each dotted key: its last part, or more of it where two keys would have the same."""
    labels = {key: _last(key) for key in keys}
    twice = {label for label in labels.values() if list(labels.values()).count(label) > 1}
    return {key: _safe(key if label in twice else label) for key, label in labels.items()}


def short_names(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What tells the cases of a grid apart, in few words: `speculative 0.8`. Names that a grid did not make stay as they are.

    `cases` has each case's changes. The names have nothing that all cases share, and no key whose values speak for themselves.
    """
    names = {name: name for name in cases}
    first = next(iter(cases.values()), {})
    labels = _labels(list(first))
    if len(cases) < 2 or any(changes.keys() != first.keys() for changes in cases.values()) or not first:
        return names
    if not all(name.startswith(f"{labels[next(iter(first))]}-") for name in cases):
        return names
    varied = [key for key in first if any(not _same(changes[key], first[key]) for changes in cases.values())]
    bare = [key for key in varied if all(isinstance(changes[key], str | Mapping) for changes in cases.values())]
    bare += varied if len(varied) - len(bare) == 1 and bare else []
    parts = {
        name: [
            _distinction(changes[key], [other[key] for other in cases.values()])
            if key in bare
            else f"{labels[key]} {_short(changes[key])}"
            for key in varied
        ]
        for name, changes in cases.items()
    }
    short = {name: " ".join(words) for name, words in parts.items()}
    return short if len(set(short.values())) == len(short) and all(short.values()) else names


def _distinction(value: Any, others: Sequence[Any]) -> str:
    """A value in words; of a mapping its kind, and what others of this kind have differently."""
    if not isinstance(value, Mapping) or "kind" not in value:
        return _short(value)
    alike = [other for other in others if isinstance(other, Mapping) and other.get("kind") == value["kind"]]
    own = [key for key in value if any(other.get(key) != value[key] for other in alike)]
    return " ".join([_short(value["kind"]), *(f"{key} {_short(value[key])}" for key in own)])


def _last(key: str) -> str:
    """The last part that says something: `model` of model.path."""
    parts = key.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in {"path", "kind"} else parts[-1]


def _short(value: Any) -> str:
    """A value as a part of a folder's name: a number, a word, the last part of a path, the values of a mapping."""
    if isinstance(value, Mapping):
        parts = [_short(inner) if key == "kind" else f"{key}-{_short(inner)}" for key, inner in value.items()]
        return _safe("-".join(parts))
    if isinstance(value, list):
        return _safe("+".join(map(_short, value)))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and (":" in value or "/" in value):
        return _safe(re.split(r"[:/]", value.rstrip("/"))[-1])
    return _safe(str(value))


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text).strip("-") or "x"


def _unique(names: Sequence[str]) -> list[str]:
    """The names, those that are taken already with a number behind them."""
    unique: list[str] = []
    for name in names:
        number, free = 2, name
        while free.casefold() in {other.casefold() for other in unique}:
            number, free = number + 1, f"{name}.{number}"
        unique.append(free)
    return unique


def _fitting(name: str) -> str:
    """The name, cut where it is too long; a hash keeps it unique."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _check_not_varied(key: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an override of a key that cases set: it would have no effect on them."""
    for name, case in changes.items():
        for varied in case:
            if f"{varied}.".startswith(f"{key}.") or f"{key}.".startswith(f"{varied}."):
                raise UserError(
                    f"the case {name} of the sweep sets {varied}; change it in the sweep file", field=f"--set {key}"
                )


def _case(name: str, changes: Mapping[str, Any], base: Mapping[str, Any], title: str, place: str) -> CaseSpec:
    output = base.get("output", {})
    data = dict(base) | {"name": title}
    data["output"] = output | {"path": place} if isinstance(output, dict) else output
    try:
        return CaseSpec(name, changes, check_spec(data, changes.items()))
    except UserError as error:
        return CaseSpec(name, changes, None, error)


def changes_text(changes: Mapping[str, Any]) -> str:
    """What differs from the base, in one line."""
    text = yaml.safe_dump(dict(changes), default_flow_style=True, sort_keys=False, width=math.inf)
    return shorten(text.strip()[1:-1] or "the base", 400, placeholder="...")
