"""The plan of a job: its rows, the unit of each row, and the fingerprint of everything that results depend on.

    inputs --survey--> rows with lengths --PlanWriter--> plan/part-*.parquet, then _plan.json, which never changes

A plan depends only on the spec and the inputs, not on workers, devices or batch sizes. Building it twice gives the same
bytes. Memory use does not grow with the input.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from draftmill.actors.planning.surveying import BATCH_ROWS, CONSTRAINED, HASH, SURVEYED, Piece, survey_pieces
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.prompts import FIELD as TEMPLATE
from draftmill.actors.rows.prompts import columns_of, prompter_of, read_columns
from draftmill.actors.rows.row import row_id
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Score, Task
from draftmill.decoders.base import ModelInfo
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import (
    Hashes,
    changed_files,
    differences,
    digest,
    results_key,
    shorten,
)
from draftmill.jobs.plan.id_sets import DuplicateFinder, RowPlace, hashes_in, hashes_of
from draftmill.jobs.plan.packing import PlanWriter, discard_parts
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.errors import RowError, UserError, brief, list_names
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.fields import field_of, lift
from draftmill.storage.inputs.kept import KeptTypes, schema_from_json, schema_to_json
from draftmill.storage.inputs.lines import lacks_custom_id
from draftmill.storage.inputs.reader import delimiter_hint, iterate, read_rows
from draftmill.storage.inputs.rows import InputFile, Row, default_id
from draftmill.storage.json_text import parse_json, shaped
from draftmill.storage.runs.records import SCHEMA_VERSION, schema_of
from draftmill.storage.runs.unit_table import PLAN, ROW_SCHEMA, PlannedRow, PlanTable, parts_of
from draftmill.storage.stores.interface import AlreadyExists, NotFound, Store
from draftmill.version import __version__

MOST_THREADS = 16
"""Tokenizing releases the interpreter's lock. Reading and counting rows hold it, so more threads would be idle."""


Survey = Callable[[JobSpec, Maker, Sequence[InputFile], KeptTypes | None], Iterator[pa.Table]]
"""A way to read and measure the rows: `survey` in this process, or tasks on a cluster (jobs/drive/backend.py), whose tables
also have the column draftmill.actors.planning.surveying.HASH."""


def survey(
    spec: JobSpec, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None = None
) -> Iterator[pa.Table]:
    """Yield tables of SURVEYED in input order, at most `input.limit` rows in total.

    `kept` collects the types of the columns that are copied into the results. Raises UserError if a whole file is missing or
    damaged.
    """
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    pieces = [Piece(number, file) for number, file in enumerate(inputs)]
    return survey_pieces(spec.recipe(), maker, pieces, kept, limit=spec.input.limit, threads=threads)


def each_sample(table: pa.Table, count: int) -> Iterator[pa.Table]:
    """Repeat each row of a survey's table once for every sample (`sampling.n`); the samples of a row stay together.

    Yields small tables, since there may be thousands of samples.
    """
    if count == 1:
        yield table
        return
    at = ROW_SCHEMA.get_field_index("sample")
    at_once = max(1, BATCH_ROWS // count)
    for start in range(0, table.num_rows, at_once):
        rows = table.slice(start, at_once)
        repeated = rows.take(pa.array(np.repeat(np.arange(rows.num_rows), count)))
        numbers = pa.array(np.tile(np.arange(count, dtype=np.int32), rows.num_rows))
        yield repeated.set_column(at, ROW_SCHEMA.field("sample"), numbers)


LOOKED_AT: Final = 1000
"""Rows among which a message looks for a value of a column."""

UNREADABLE: Final = ("bad_json", "bad_encoding", "bad_row")
"""Error kinds of rows that can't be read; such rows say nothing about the input's columns."""

FORMATS: Final = {"format": 1, "schema_version": SCHEMA_VERSION}
"""The versions of `_plan.json` and of the results. A run of another version is not read."""


T = TypeVar("T")

Sift = Callable[[pa.Table], pa.Table]
"""Skips rows of a survey's table."""

SampleName = tuple[str, int]
"""What identifies a sample in a run: the id of its row, and its number among the row's samples."""


def names_of(table: pa.Table) -> list[SampleName]:
    """The names of the rows of a plan's or a result's table."""
    return list(zip(table["id"].to_pylist(), table["sample"].to_pylist(), strict=True))


class NothingLeft(UserError):
    """The plan would skip every row of the inputs: there is nothing to plan, and nothing has been written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as stored in the run directory. `tokens` and `holes` are sums over all canvases; `store` holds its rows.

    Its rows are samples: with `sampling.n` above 1, each row of the inputs is there n times. The first pass (`pass_` 1) has
    every row of the inputs, a later pass the rows that failed in the one before.
    """

    fingerprint: str
    code_version: str
    spec: JobSpec
    results: dict[str, Any]
    files: tuple[InputFile, ...]
    rows: int
    units: int
    tokens: int
    holes: int
    errors: dict[str, int]
    parts: list[dict[str, Any]] = field(repr=False)
    store: Store = field(repr=False)
    pass_: int = 1
    keep: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the result rows."""
        return schema_of(self.keep)

    @property
    def is_readable(self) -> bool:
        """Whether any row can be decoded."""
        return sum(self.errors.values()) < self.rows

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


def build_plan(
    spec: JobSpec,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    hashes: Hashes,
    inputs: Sequence[InputFile],
    store: Store,
    *,
    epoch: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
    sift: Sift | None = None,
    survey: Survey = survey,
) -> Plan:
    """Read and measure every row, write the unit table and then `_plan.json`. Calls `progress` with each number of rows read.

    `epoch` is the epoch of the driver's lease. `sift` skips rows that the plan must not have; NothingLeft if it skips all.
    `survey` reads the rows; the plan does not depend on how it does so. Raises UserError, and leaves no files, if the inputs
    have no rows, an id occurs twice, no row has a column that the spec names, or a file is damaged.
    """
    maker = maker_for(spec.recipe(hashes.ends), tokenizer, info)
    unit_rows = None if spec.output.unit_rows == "auto" else spec.output.unit_rows
    writer = PlanWriter(store, window=spec.batching.window, unit_rows=unit_rows, epoch=epoch)
    discard_parts(store, epoch)
    kept = KeptTypes(spec.kept) if spec.kept else None
    try:
        for table in check_survey(survey(spec, maker, inputs, kept), spec, inputs):
            for samples in each_sample(table if sift is None else sift(table), spec.sampling.n):
                writer.add(samples)
            progress(table.num_rows)
        writer.finish()
        if not writer.totals.rows:
            raise NothingLeft(f"{spec.input.shown}: no row is new", field="input.dedupe")
        if kept is not None and (absent := kept.absent()):
            field = "input.keep" if absent[0] in spec.input.keep else "input.columns.reference"
            raise UserError(f"no row has a column {absent[0]!r}", field=field)
    except UserError:
        discard_parts(store, epoch)
        raise
    failpoint("plan.before_plan")
    keep = None if kept is None else kept.schema()
    return create_plan(store, spec, results_key(spec, info, hashes, inputs), inputs, writer, keep=keep)


def create_plan(
    store: Store,
    spec: JobSpec,
    results: dict[str, Any],
    inputs: Sequence[InputFile],
    writer: PlanWriter,
    *,
    pass_: int = 1,
    keep: pa.Schema | None = None,
) -> Plan:
    """Write `_plan.json` after all parts; the plan exists from then on. `results` is its results_key.

    `keep` has the types of the columns that are copied into the results, None if there are none.
    """
    totals = {"units": len(writer.sums.rows)} | asdict(writer.totals)
    return store_plan(store, spec, results, inputs, totals=totals, parts=writer.unit_table(), pass_=pass_, keep=keep)


def store_plan(
    store: Store,
    spec: JobSpec,
    results: dict[str, Any],
    inputs: Sequence[InputFile],
    *,
    totals: dict[str, Any],
    parts: list[dict[str, Any]],
    pass_: int = 1,
    keep: pa.Schema | None = None,
) -> Plan:
    """Write `_plan.json` for parts that are in the store; `totals` and `parts` as the file lists them."""
    content = {
        **FORMATS,
        "fingerprint": digest(results),
        "code_version": __version__,
        "pass": pass_,
        "totals": totals,
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
    return _plan_of(content, store)


def load_plan(store: Store) -> Plan | None:
    """Return the plan of a run directory, None if it has none; UserError if it is damaged or has another format."""
    return _read_plan(store, lambda content: _plan_of(content, store))


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


def check_survey(tables: Iterable[pa.Table], spec: JobSpec, inputs: Sequence[InputFile]) -> Iterator[pa.Table]:
    """Pass the survey's tables through; UserError for no rows, a duplicate id, a column that no readable row has, or names of
    constraints that no marker has."""
    rows, kinds, is_constrained = 0, Counter[str | None](), False
    with DuplicateFinder() as finder:
        for table in tables:
            is_hashed = HASH.name in table.column_names
            hashes = hashes_in(table[HASH.name]) if is_hashed else hashes_of(table["id"].to_pylist())
            finder.add(hashes, table["file"].to_numpy(), table["row"].to_numpy())
            before, rows = rows, rows + table.num_rows
            if (
                before < spec.batching.window <= rows
            ):  # as soon as the first window is there, whatever the tables' sizes
                first = table["error_kind"][: spec.batching.window - before]
                if lacks_a_column(kinds + kinds_of(first)):
                    raise no_column(spec, inputs)
            kinds += kinds_of(table["error_kind"])
            is_constrained |= bool(pc.any(table[CONSTRAINED.name]).as_py())
            yield table.select(SURVEYED.names)
        if rows == 0:
            raise UserError(f"{spec.input.shown}: no rows in {counted(len(inputs), 'file')}", field="input.path")
        if lacks_a_column(kinds):
            raise no_column(spec, inputs)
        if set(kinds) <= set(UNREADABLE) and (hint := delimiter_hint(inputs)):
            raise UserError(f"none of {rows:,} rows can be read{hint}", field="input.delimiter")
        if kinds[None] and not is_constrained:
            check_names(spec)
        twice = finder.first()
        if twice is not None:
            raise _twice(spec, inputs, *twice)


def check_names(spec: JobSpec) -> None:
    """UserError if the spec names constraints; call it where no hole of any row has one."""
    given = getattr(spec.task, "constraint", None)
    if isinstance(given, dict) and spec.input.columns.constraint is None:
        raise UserError(f"no marker of any row names one of them: {list_names(given)}", field="task.constraint")


def kinds_of(kinds: pa.ChunkedArray) -> Counter[str | None]:
    """How often each error kind occurs; None counts the valid rows."""
    if kinds.null_count == len(kinds):
        return Counter({None: len(kinds)})
    return Counter({pair["values"]: pair["counts"] for pair in pc.value_counts(kinds).to_pylist()})


def lacks_a_column(kinds: Mapping[str | None, int]) -> bool:
    """Whether every readable row lacks a needed column. `kinds` counts the error kinds of all rows, None for valid rows.

    Unreadable rows say nothing about the columns: one of them among many must not hide that the spec is wrong.
    """
    return bool(kinds.get("missing_column")) and set(kinds) <= {"missing_column", *UNREADABLE}


def no_column(spec: JobSpec, inputs: Sequence[InputFile]) -> UserError:
    """The error of a job whose rows all lack a needed column: then the spec is wrong, not the rows."""

    def rows_of() -> Iterator[Row]:
        return (row for file in inputs for row in iterate(file, chunk_chars=spec.input.chunk_chars))

    first = next((row for row in rows_of() if row.error is None), None)
    there = (first.values if first is not None else None) or {}
    if not isinstance(spec.task, Infill) and not spec.task.chat and there.get("messages") is not None:
        return UserError(
            "rows have no prompt or text, but they have messages, which only a chat reads; allowed: true",
            field="task.chat",
        )
    if lacks_custom_id(there):
        return UserError(
            "rows are OpenAI requests without custom_id; allowed: a text of its own in each", field="input.path"
        )
    if spec.prompt.template is not None:
        try:
            prompter_of(spec.prompt, spec.chat, spec.input.columns, spec.task).fill(
                lift(there, columns_of(spec.prompt.template))
            )
        except RowError as error:
            return UserError(f"no row has all columns: {error.message.removeprefix(f'{TEMPLATE}: ')}", field=TEMPLATE)
    expected = _expected_column(spec.task, there)
    needed = spec.input.columns.mapping() or {expected: expected}
    name, column = next((pair for pair in needed.items() if field_of(there, pair[1]) is None), (expected, expected))
    says = f"no row has a value in a column {column!r}; the first row has {list_names(there)}"
    held = (field_of(row.values or {}, column) for row in islice(rows_of(), LOOKED_AT) if row.error is None)
    value = next((value for value in held if value is not None), None)
    if isinstance(value, str) or (value is not None and name not in TEXT_COLUMNS):
        says = f"rows have no value in a column {column!r}, and those that have one can't be read for other reasons"
    elif value is not None:
        says = f"no row has a text in a column {column!r}; the first one that has it holds {type(value).__name__} there"
    return UserError(f"{says} ({inputs[0].name}){delimiter_hint(inputs)}", field=f"input.columns.{name}")


TEXT_COLUMNS: Final = ("text", "prompt", "completion", "prefix", "suffix", "system")


def _expected_column(task: Task, there: dict[str, Any]) -> str:
    """The column that such a row lacks, if the spec names no columns."""
    if isinstance(task, Infill) or (isinstance(task, Score) and task.mask is not None):
        return "text"
    has_text = there.get("text") is not None or there.get("completion") is not None
    return "prompt" if isinstance(task, Complete) or has_text else "text"


def _twice(spec: JobSpec, inputs: Sequence[InputFile], first: RowPlace, second: RowPlace) -> UserError:
    name = _id_at(spec, inputs[second[0]], second[1])
    places = " and ".join(f"row {row} of {inputs[file].name}" for file, row in (first, second))
    return UserError(f"the id {brief(name)} occurs twice: {places}; ids must be unique", field="input.columns.id")


def _id_at(spec: JobSpec, file: InputFile, row: int) -> str:
    columns = read_columns(spec.recipe())
    found = next(read_rows(file, [(row, None)], columns=columns, chunk_chars=spec.input.chunk_chars))
    return row_id(found.values or {}, spec.input.columns) or default_id(file, row)


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


Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class _Totals:
    rows: Count
    units: Count
    tokens: Count
    holes: Count
    errors: dict[str, Count]


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    first: Count
    units: Count
    rows: Count


@dataclass(frozen=True, slots=True)
class _Content:
    """The keys of `_plan.json` whose shape nothing else checks."""

    fingerprint: str
    code_version: str
    totals: _Totals
    results: dict[str, Any]
    inputs: tuple[InputFile, ...]
    parts: list[_Part]


def _plan_of(content: dict[str, Any], store: Store) -> Plan:
    """The plan in the content of `_plan.json`; ValueError, KeyError, TypeError or OverflowError if it is damaged."""
    held = shaped(_Content, content)
    if digest(held.results) != held.fingerprint:
        raise ValueError("its fingerprint is not that of its results")
    first = 0
    for part, listed in zip(held.parts, content["parts"], strict=True):
        rows = listed["unit_rows"]
        if (part.first, part.units, part.rows) != (first, len(rows), sum(rows)):
            raise ValueError(f"{part.name} does not hold the units after {first}")
        first += part.units
    if first != held.totals.units:
        raise ValueError(f"it has {first} units, not {held.totals.units}")
    return Plan(
        fingerprint=held.fingerprint,
        code_version=held.code_version,
        spec=check_spec(content["spec"]),
        results=held.results,
        files=held.inputs,
        rows=held.totals.rows,
        units=held.totals.units,
        tokens=held.totals.tokens,
        holes=held.totals.holes,
        errors=held.totals.errors,
        parts=content["parts"],
        store=store,
        pass_=int(content.get("pass", 1)),
        keep=schema_from_json(content.get("keep")),
    )
