"""Makes the plan of a job: reads and measures every row of the inputs, and packs the rows into units.

    inputs --survey--> rows with lengths --PlanWriter--> plan/part-*.parquet, then _plan.json, which never changes

A plan depends only on the spec and the inputs, not on workers, devices or batch sizes. Making it twice gives the same
bytes. Memory use does not grow with the input.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.actors.job import RowRecipe
from draftmill.actors.planning.surveying import (
    BATCH_ROWS,
    CONSTRAINED,
    HASH,
    SURVEYED,
    FilePart,
    survey_pieces,
)
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.fim import fills_in_middle
from draftmill.actors.rows.makers import Maker, shares_beginnings
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import row_id
from draftmill.actors.rows.unit_io import make_row
from draftmill.actors.task import Score
from draftmill.jobs.formatting import Notes, counted, size_text
from draftmill.jobs.plan.fingerprint import digest, with_files
from draftmill.jobs.plan.id_sets import DuplicateFinder, RowPlace, hashes_in, hashes_of
from draftmill.jobs.plan.packing import PlanWriter, discard_parts
from draftmill.jobs.plan.plan import NothingLeft, Plan, compare_plan, create_plan, load_plan
from draftmill.jobs.plan.resolve import Resolved, begins_with_request, length_note
from draftmill.storage.errors import RowError, UserError, brief, list_names
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.inputs.reader import delimiter_hint, iterate, read_rows
from draftmill.storage.inputs.rows import InputFile, default_id
from draftmill.storage.inputs.sources import num_bytes_to_hash, with_hashes, with_known_hashes
from draftmill.storage.runs.unit_table import ROW_SCHEMA, part_name
from draftmill.storage.stores.store import Store

LIMITED_HASH_BYTES = 2**30
"""With `input.limit`, a job may read few rows of a huge file: files larger than this are identified by size and date alone."""

Survey = Callable[[RowRecipe, Maker, Sequence[InputFile], KeptTypes | None, int | None], Iterator[pa.Table]]
"""A way to read and measure the rows: `survey` in this process, or tasks on a cluster (jobs/drive/backend.py), whose tables
also have the column draftmill.actors.planning.surveying.HASH."""


def survey(
    recipe: RowRecipe,
    maker: Maker,
    inputs: Sequence[InputFile],
    kept: KeptTypes | None = None,
    limit: int | None = None,
) -> Iterator[pa.Table]:
    """Yield tables of SURVEYED in input order, at most `limit` rows in total.

    `kept` collects the types of the columns that are copied into the results. Raises UserError if a whole file is missing or
    damaged.
    """
    # Tokenizing releases the interpreter's lock. Reading and counting rows hold it, so more threads would be idle.
    threads = min(16, os.cpu_count() or 1)
    pieces = [FilePart(number, file) for number, file in enumerate(inputs)]
    return survey_pieces(recipe, maker, pieces, kept, limit=limit, threads=threads)


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


UNREADABLE: Final = ("bad_json", "bad_encoding", "bad_row")
"""Error kinds of rows that can't be read; such rows say nothing about the input's columns."""

Sift = Callable[[pa.Table], pa.Table]
"""Skips rows of a survey's table."""


def make_plan(
    resolved: Resolved,
    store: Store,
    display: Notes,
    *,
    epoch: int = 0,
    sift: Sift | None = None,
    survey: Survey = survey,
) -> Plan:
    """Read and measure every row of the inputs and write the plan; call it only under the lease, whose epoch is `epoch`.

    `survey` reads the rows: in this process, or by tasks of a cluster (Backend.survey); the plan does not depend on how it does
    so. `sift` skips rows that the plan must not have; NothingLeft if it skips all. If another driver has planned since `resolve`,
    its plan is compared and returned. Raises UserError, and leaves no files, if the inputs have no rows, an id occurs twice, no
    row has a column that the spec names, or a file is damaged.
    """
    spec, recipe = resolved.spec, resolved.recipe
    plan = load_plan(store)
    if plan is not None:
        inputs = with_known_hashes(resolved.inputs, {file.name: file for file in plan.files})
        compare_plan(plan, resolved.recorded, with_files(resolved.results, inputs), inputs)
        return plan
    size = size_text(sum(file.size or 0 for file in resolved.inputs))
    if note := length_note(recipe.task, resolved.info):
        display.note(note)
    display.note(f"planning: reading {counted(len(resolved.inputs), 'input file')}, {size}")
    most_bytes = None if spec.input.limit is None else LIMITED_HASH_BYTES
    num_bytes = num_bytes_to_hash(resolved.inputs, most_bytes)
    if num_bytes >= 2**30:  # it takes a second or two
        display.note(f"planning: hashing {num_bytes / 1e9:,.1f} GB of input, so that a resume can detect changes")
    inputs = with_hashes(resolved.inputs, most_bytes=most_bytes)
    writer = PlanWriter(store, window=spec.batching.window, unit_rows=spec.output.unit_rows, epoch=epoch)
    discard_parts(store, epoch)
    kept = KeptTypes(spec.kept) if spec.kept else None
    rows = said = 0
    try:
        tables = survey(recipe, resolved.maker(), inputs, kept, spec.input.limit)
        for table in check_survey(tables, resolved):
            for samples in each_sample(table if sift is None else sift(table), recipe.sampling.n):
                writer.add(samples)
            rows += table.num_rows
            if rows - said >= 1_000_000:
                said = rows
                display.note(f"planning: {rows:,} rows")
        writer.finish()
        if not writer.totals.rows:
            why = "finished runs have all its ids as ok"
            raise NothingLeft(f"nothing is new in {spec.input.shown}: {why}; no run is started")
        if kept is not None and (absent := kept.absent()):
            field = "input.keep" if absent[0] in spec.input.keep else "input.columns.reference"
            raise UserError(f"no row has a column {absent[0]!r}", field=field)
    except UserError:
        discard_parts(store, epoch)
        raise
    failpoint("plan.before_plan")
    keep = None if kept is None else kept.schema()
    results, table = with_files(resolved.results, inputs), (writer.totals, writer.parts)
    plan = create_plan(store, resolved.recorded, results, inputs, *table, keep=keep)
    samples, units = counted(plan.rows, "sample"), counted(plan.units, "unit")
    display.note(f"planned: {samples}, {plan.totals.holes:,} tokens {recipe.task.goal}, {units}")
    return plan


def check_survey(tables: Iterable[pa.Table], resolved: Resolved) -> Iterator[pa.Table]:
    """Pass the survey's tables through; UserError for no rows, a duplicate id, a column that no readable row has, or names of
    constraints that no marker has."""
    rows, kinds, is_constrained, window = 0, Counter[str | None](), False, resolved.spec.batching.window
    with DuplicateFinder() as finder:
        for table in tables:
            is_hashed = HASH.name in table.column_names
            hashes = hashes_in(table[HASH.name]) if is_hashed else hashes_of(table["id"].to_pylist())
            finder.add(hashes, table["file"].to_numpy(), table["row"].to_numpy())
            before, rows = rows, rows + table.num_rows
            # As soon as the first window is there, whatever the tables' sizes.
            first = table["error_kind"][: window - before]
            if before < window <= rows and lacks_a_column(kinds + kinds_of(first)):
                raise no_column(resolved)
            kinds += kinds_of(table["error_kind"])
            is_constrained |= bool(pc.any(table[CONSTRAINED.name]).as_py())
            yield table.select(SURVEYED.names)
        check_kinds(kinds, resolved, is_constrained=is_constrained)
        twice = finder.first()
        if twice is not None:
            raise _twice(resolved, *twice)


def check_kinds(kinds: Counter[str | None], resolved: Resolved, *, is_constrained: bool) -> None:
    """UserError if the error kinds of rows, None for valid ones, say that the spec is wrong, not the rows.

    `is_constrained` is whether a hole of any row has a constraint.
    """
    recipe, inputs = resolved.recipe, resolved.inputs
    if not kinds:
        raise UserError(f"{resolved.spec.input.shown}: no rows in {counted(len(inputs), 'file')}", field="input.path")
    if lacks_a_column(kinds):
        raise no_column(resolved)
    if set(kinds) <= set(UNREADABLE) and (hint := delimiter_hint(inputs)):
        raise UserError(f"none of {kinds.total():,} rows can be read{hint}", field="input.delimiter")
    given = getattr(recipe.task, "constraint", None)
    if kinds[None] and not is_constrained and isinstance(given, dict) and recipe.columns.constraint is None:
        raise UserError(f"no marker of any row names one of them: {list_names(given)}", field="task.constraint")


def kinds_of(kinds: pa.ChunkedArray) -> Counter[str | None]:
    """How often each error kind occurs; None counts the valid rows."""
    return Counter({pair["values"]: pair["counts"] for pair in pc.value_counts(kinds).to_pylist()})


def lacks_a_column(kinds: Mapping[str | None, int]) -> bool:
    """Whether every readable row lacks a needed column. `kinds` counts the error kinds of all rows, None for valid rows.

    Unreadable rows say nothing about the columns: one of them among many must not hide that the spec is wrong.
    """
    return bool(kinds.get("missing_column")) and set(kinds) <= {"missing_column", *UNREADABLE}


@dataclass(frozen=True, slots=True)
class FirstRow:
    """A row of the input with this number, where it is there, and its canvas, or why it has none."""

    file: int
    offset: int | None
    id: str
    key: int
    made: Canvas | RowError

    @property
    def error(self) -> str | None:
        return self.made.kind if isinstance(self.made, RowError) else None


def first_rows(resolved: Resolved, columns: dict[str, str] | None) -> Iterator[FirstRow]:
    """All rows of the inputs, in order; of a table only these columns are read, None for all."""
    recipe, maker = resolved.recipe, resolved.maker()
    for number, file in enumerate(resolved.inputs):
        for row in iterate(file, columns=columns, chunk_chars=recipe.chunk_chars):
            yield FirstRow(number, row.offset, *make_row(recipe, file, row, maker.make))


def no_column(resolved: Resolved) -> UserError:
    """The error of a job whose rows all lack a needed column: then the spec is wrong, not the rows."""
    errors = (row.made for row in first_rows(resolved, None) if isinstance(row.made, RowError))
    first = next((error.message for error in errors if error.kind == "missing_column"), "")
    return UserError(f"no row has all columns: {first}{delimiter_hint(resolved.inputs)}", field="input.columns")


def _twice(resolved: Resolved, first: RowPlace, second: RowPlace) -> UserError:
    recipe, inputs = resolved.recipe, resolved.inputs
    file, row = inputs[second[0]], [(second[1], None)]
    found = next(read_rows(file, row, columns=read_columns(recipe), chunk_chars=recipe.chunk_chars))
    name = row_id(found.values or {}, recipe.columns) or default_id(file, second[1])
    places = " and ".join(f"row {row} of {inputs[file].name}" for file, row in (first, second))
    return UserError(f"the id {brief(name)} occurs twice: {places}; ids must be unique", field="input.columns.id")


# ---- one plan for several jobs: jobs whose rows have the same canvases get copies of one unit table
#
# Reading and tokenizing the rows is the expensive part of planning; a copy needs neither. Each job's run directory stays
# complete: it has its own `_plan.json` with its own fingerprint, and its own copy of the parts.

OF_DRAWING = ("temperature", "top_k", "top_p", "acceptance")
"""Keys of `sampling` that no canvas depends on."""


def plan_groups(jobs: Sequence[Resolved]) -> list[list[int]]:
    """Group jobs, by their numbers, whose unit tables are equal: the same rows, ids, keys, canvases and units.

    Of jobs whose rows have settings of their own, only those are together that allow a row the same settings.
    """
    by_canvas: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        by_canvas.setdefault(canvas_key(job), []).append(number)
    groups: dict[tuple[str, str], list[int]] = {}
    for key, numbers in by_canvas.items():
        recipe = jobs[numbers[0]].recipe
        have_settings = recipe.columns.has_own_settings() or begins_with_request(recipe, jobs[numbers[0]].inputs)
        for number in numbers:
            groups.setdefault((key, settings_key(jobs[number]) if have_settings else ""), []).append(number)
    return list(groups.values())


def canvas_key(resolved: Resolved) -> str:
    """A digest of everything that the canvases and units depend on, except the settings that rows may have of their own.

    These are the inputs, the task, the tokenizer, the seed, the window, the model's length limit and ids, and whether rows
    that begin alike come together. Everything in the fingerprint counts that is not known to be without effect.
    """
    spec, recipe, info, tokenizer = resolved.spec, resolved.recipe, resolved.info, resolved.tokenizer
    key = dict(resolved.results)
    model = key.pop("model")
    del key["decoder"]
    key["sampling"] = {name: value for name, value in key.get("sampling", {}).items() if name not in OF_DRAWING}
    key["files"] = _files_key(tuple(resolved.inputs))
    key["keep"] = list(spec.kept)  # input.keep, and what metrics need
    key["packing"] = [spec.batching.window, spec.output.unit_rows]
    key["tokenizer"] = [model["tokenizer"], tokenizer is None, getattr(tokenizer, "bos_id", None), list(recipe.ends)]
    key["model"] = [info.max_length, info.vocab_size, info.mask_id, fills_in_middle(recipe.task, info)]
    key["beginnings"] = shares_beginnings(recipe.task, info)
    if isinstance(recipe.task, Score):  # what can be scored depends on the kind of model
        key["model"] += [info.kind, list(info.suppressed), info.shift, info.block_size]
    return digest(key)


@lru_cache(maxsize=16)
def _files_key(files: tuple[InputFile, ...]) -> str:
    """A digest of inputs as they were listed; a hash is known only of those that were planned before."""
    return digest([file.facts() | {"sha256": None} for file in files])


def settings_key(resolved: Resolved) -> str:
    """A digest of everything that decides which settings a row may have."""
    decoder, sampling = resolved.recipe.decoder.baseline, resolved.recipe.sampling
    return digest([decoder.draws_by_row, decoder.token_logprobs, sampling.model_dump(mode="json")])


def copy_plan(resolved: Resolved, donor: Plan, store: Store, *, epoch: int) -> Plan:
    """Write a plan with the units of `donor`, the plan of a job in the same group, into another run directory.

    Call it only under the run directory's lease, whose epoch is `epoch`. The result is the plan that `make_plan` would make.
    """
    discard_parts(store, epoch)
    parts = []
    for number, part in enumerate(donor.parts):
        failpoint("plan.before_part")
        parts.append(part | {"name": part_name(number, epoch)})
        store.put(parts[-1]["name"], donor.store.get(part["name"]))
    failpoint("plan.before_plan")
    results = with_files(resolved.results, donor.files)
    return create_plan(store, resolved.recorded, results, donor.files, donor.totals, parts, keep=donor.keep)
