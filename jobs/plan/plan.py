"""The plan of a job: its rows, the unit of each row, and the fingerprint of everything that results depend on.

jobs/plan/planning.py makes it. It is stored in plan/part-*.parquet and _plan.json, which never change.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import pyarrow as pa
from pydantic import ConfigDict, Field, SkipValidation

from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.formatting import Notes
from draftmill.jobs.plan.fingerprint import changed_files, differences, digest, shorten
from draftmill.jobs.plan.packing import PlanTotals
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.kept import schema_from_json, schema_to_json
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.json_text import parse_json, shaped
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.runs.records import SCHEMA_VERSION, schema_of
from draftmill.storage.runs.unit_table import PLAN, FinishedRun, PlannedRow, PlanPart, PlanTable, parts_of
from draftmill.storage.stores.store import AlreadyExists, NotFound, Place, Store, about, open_store
from draftmill.version import __version__

FORMATS: Final = {"format": 1, "schema_version": SCHEMA_VERSION}
"""The versions of `_plan.json` and of the results. A run of another version is not read."""

PASSES: Final = "passes/"
"""The folder, in a run directory, with the run directories of its later passes (jobs/results/passes.py)."""

T = TypeVar("T")

SampleName = tuple[str, int]
"""What identifies a sample in a run: the id of its row, and its number among the row's samples."""


def names_of(table: pa.Table) -> list[SampleName]:
    """The names of the rows of a plan's or a result's table."""
    return list(zip(table["id"].to_pylist(), table["sample"].to_pylist(), strict=True))


def pass_place(place: Place, number: int) -> Place:
    """The run directory of a pass, inside the run's own."""
    return place if number == 1 else place.below(f"{PASSES}{number:04d}")


class NothingLeft(UserError):
    """The plan would skip every row of the inputs: there is nothing to plan, and nothing has been written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as stored in the run directory; `store` holds its rows.

    Its rows are samples: with `sampling.n` above 1, each row of the inputs is there n times. The first pass (`pass_` 1) has
    every row of the inputs, a later pass the rows that failed in the one before.
    """

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    fingerprint: str
    code_version: str
    spec: JobSpec
    results: dict[str, Any]
    files: Annotated[tuple[InputFile, ...], Field(alias="inputs")]
    totals: PlanTotals
    parts: list[dict[str, Any]] = field(repr=False)
    store: SkipValidation[Store] = field(repr=False)
    pass_: Annotated[int, Field(alias="pass")] = 1
    keep: pa.Schema | None = None

    @property
    def rows(self) -> int:
        return self.totals.rows

    @property
    def units(self) -> int:
        return self.totals.units

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.keep)

    def sizes(self) -> Iterator[UnitSize]:
        """Rows, tokens and window of every unit, in order."""
        window = 0
        for part in self.parts:
            pairs = zip(part["unit_rows"], part["unit_tokens"], strict=True)
            begins = set(part["windows"]) - {0}
            for number, (rows, tokens) in enumerate(pairs, start=part["first"]):
                window += number in begins
                yield UnitSize(number, rows, tokens, window)

    def unit_rows(self, unit: int) -> list[PlannedRow]:
        """The rows of one unit, in the order of its result file."""
        return self._table().unit_rows(unit)

    def unit_samples(self) -> Iterator[tuple[int, list[SampleName]]]:
        """Yield every unit with the id and sample number of its rows; holds one part in memory at a time."""
        for unit, table in enumerate(self.tables(["id", "sample"])):
            yield unit, names_of(table)

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the unit table as one table per unit, in order; holds one part in memory at a time."""
        return self._table().tables(columns)

    def _table(self) -> PlanTable:
        return PlanTable(self.store, parts_of(self.parts))


def create_plan(
    store: Store,
    spec: JobSpec,
    results: dict[str, Any],
    inputs: Sequence[InputFile],
    totals: PlanTotals,
    parts: list[dict[str, Any]],
    *,
    pass_: int = 1,
    keep: pa.Schema | None = None,
) -> Plan:
    """Write `_plan.json` for parts that are in the store; the plan exists from then on. `results` is its results_key.

    `keep` has the types of the columns that are copied into the results, None if there are none.
    """
    content = {
        **FORMATS,
        "fingerprint": digest(results),
        "code_version": __version__,
        "pass": pass_,
        "totals": asdict(totals),
        "results": results,
        "spec": spec.model_dump(mode="json"),
        "inputs": [file.facts() for file in inputs],
        "parts": parts,
        "keep": schema_to_json(keep),
    }
    try:
        store.create(PLAN, _text(content).encode())
    except AlreadyExists:  # another driver wrote it; use it if it is the same job
        plan = load_plan(store)
        assert plan is not None
        compare_plan(plan, spec, results, inputs)
        return plan
    return _plan_of(content, spec, store)


def load_plan(store: Store) -> Plan | None:
    """Return the plan of a run directory, None if it has none; UserError if it is damaged or has another format."""
    return _read_plan(store, lambda content: _plan_of(content, check_spec(content["spec"]), store))


def planned_inputs(store: Store) -> list[dict[str, Any]]:
    """The inputs of a run's plan as data, each an InputFile's; none if it has no plan. UserError as `load_plan`."""
    return _read_plan(store, lambda content: list(content["inputs"])) or []


def _read_plan(store: Store, take: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        content = parse_json(store.get(PLAN), object_hook=_compact)
        for name, version in FORMATS.items():
            if content[name] != version:
                raise UserError(f"{store.url}/{PLAN} has {name} {content[name]}; this draftmill reads {version}")
        return take(content)
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{store.url}/{PLAN} is damaged: {error}; use another output.path") from None


def compare_settings(plan: Plan, spec: JobSpec) -> None:
    """Raise UserError, naming the differences, if its settings alone make `spec` a different job than the plan's.

    Ignores contents (weights, tokenizer, inputs): `compare_plan` compares them once they are hashed.
    """
    changed = differences(plan.spec.results_key(), spec.results_key(), (plan.spec, spec))
    if changed:
        raise _another_job(plan, changed)


def compare_inputs(plan: Plan, inputs: Sequence[InputFile]) -> None:
    """Raise UserError, naming the differences, if the inputs differ from the plan's."""
    files = changed_files(plan.files, inputs)
    if files:
        raise UserError(
            f"the inputs changed since {plan.store.url} was planned: {shorten(files)}; use another output.path",
            field="input.path",
        )


def _another_job(plan: Plan, changed: Sequence[str]) -> UserError:
    return UserError(
        f"{plan.store.url} holds another job: {shorten(changed)}; use another directory, or the old settings",
        field="output.path",
    )


def compare_plan(plan: Plan, spec: JobSpec, results: dict[str, Any], inputs: Sequence[InputFile]) -> None:
    """Raise UserError, naming the differences, unless `results`, the results_key of `spec`, equals the plan's."""
    if digest(results) == plan.fingerprint:
        return
    compare_inputs(plan, inputs)
    changed = differences(plan.results, results, (plan.spec, spec))
    raise _another_job(plan, [item for item in changed if not item.startswith("input.files ")])


def _text(content: dict[str, Any]) -> str:
    """JSON with one line per part, so that a plan of a million units has neither one huge line nor a million lines."""
    head = json.dumps({key: value for key, value in content.items() if key != "parts"}, indent=1)
    parts = ",\n".join(f"  {json.dumps(part, default=list)}" for part in content["parts"])
    return f'{head[:-2]},\n "parts": [\n{parts}\n ]\n}}\n'


def _compact(content: dict[str, Any]) -> dict[str, Any]:
    """A part of `_plan.json` with its lists as arrays of 4 and 8 bytes a number: there may be millions of units."""
    if content.keys() >= {"name", "first", "unit_rows", "unit_tokens", "windows"}:
        kinds = {"unit_rows": "i", "unit_tokens": "q", "windows": "i"}
        return content | {key: array(kind, content[key]) for key, kind in kinds.items()}
    return content


def _plan_of(content: dict[str, Any], spec: JobSpec, store: Store) -> Plan:
    """The plan in the content of `_plan.json`; ValueError, KeyError, TypeError or OverflowError if it is damaged."""
    parts, keep = shaped(tuple[PlanPart, ...], content["parts"]), schema_from_json(content.get("keep"))
    plan = shaped(Plan, content | {"spec": spec, "store": store, "keep": keep})
    if digest(plan.results) != plan.fingerprint:
        raise ValueError("its fingerprint is not that of its results")
    first = 0
    for part, listed in zip(parts, plan.parts, strict=True):
        rows = listed["unit_rows"]
        if (part.first, part.units, part.rows) != (first, len(rows), sum(rows)):
            raise ValueError(f"{part.name} does not hold the units after {first}")
        first += part.units
    if first != plan.totals.units:
        raise ValueError(f"it has {first} units, not {plan.totals.units}")
    return plan


# ---- the finished runs that draft (`decoder.drafter: {kind: run}`): found, checked, and what identifies them

DRAFTER_FIELD = "decoder.drafter.path"
LAST = "last"


def earlier_runs(
    spec: JobSpec, tokenizer: str, plan: Plan | None, display: Notes
) -> tuple[tuple[FinishedRun, ...], list[str] | None]:
    """The runs that the spec names, and the fingerprints of their jobs, which are a part of this job's, None if its drafter is
    another one. UserError if a run is not finished.

    `tokenizer` is the hash of this job's. A job that is resumed (it has a `plan`) does without runs that are gone, with a note:
    under coupled acceptance its texts are the same.
    """
    drafter = getattr(spec.decoder, "drafter", None)
    if not isinstance(drafter, RunDrafterSettings):
        return (), None
    runs, fingerprints = list[FinishedRun](), list[str]()
    for path in drafter.path:
        try:
            fingerprint, run = finished_run(path, spec.place(path), tokenizer)
        except UserError as error:
            if plan is None or spec.sampling.acceptance == "rejection":
                raise
            display.note(f"{DRAFTER_FIELD}: {error.message}; its texts do not draft")
            continue
        runs.append(run)
        fingerprints.append(fingerprint)
    planned: Sequence[str] | None = None if plan is None else plan.results["decoder"].get("drafter", {}).get("runs")
    if planned is not None and set(fingerprints) < set(planned):
        fingerprints = list(planned)
    return tuple(runs), fingerprints


def finished_run(path: str, place: Place, tokenizer: str) -> tuple[str, FinishedRun]:
    """The fingerprint of the run at a place, and its results with all passes; UserError if it is not finished."""
    if path == LAST:
        raise UserError(
            f"{LAST!r} is the last finished date of a recurring job, or the last finished case of a sweep; allowed: run "
            "directories, or with `draftmill run` a date in output.path: base/{date:%Y-%m-%d}",
            field=DRAFTER_FIELD,
        )
    with about(DRAFTER_FIELD):
        store = open_store(place)
        plan = load_plan(store)
        if plan is None or not is_closed(store):
            what = "no run directory" if plan is None else "not finished; `draftmill run` resumes it"
            raise UserError(f"{path!r} is {what}", field=DRAFTER_FIELD)
        if next(store.list("data/"), None) is None:
            raise UserError(f"the results of {path!r} were deleted by `draftmill prune`", field=DRAFTER_FIELD)
        passes = [(place, parts_of(plan.parts))]
        while (later := load_plan(inner := open_store(pass_place(place, len(passes) + 1)))) and is_closed(inner):
            passes.append((inner.place, parts_of(later.parts)))
        column: Literal["tokens", "text"] = "tokens" if plan.results["model"]["tokenizer"] == tokenizer else "text"
        return plan.fingerprint, FinishedRun(tuple(reversed(passes)), column)
