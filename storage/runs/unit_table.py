"""The unit table of a run directory, which lists the rows of each unit. The planner writes it, workers read it.

    plan/part-00000-0001.parquet     one row group per unit, units in order; a part holds a few hundred units
    _plan.json                       names the parts, among other facts, and is written last

The second number of a part is the epoch of the driver that wrote it: a driver that resumes late can't change another's parts.

A worker reads a part's footer once and then one row group per unit. Knows nothing of specs and models. Texts of a finished
run are found by way of its unit table.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.parquet import THREADS
from draftmill.storage.runs.records import damage_error
from draftmill.storage.runs.unit_facts import unit_name
from draftmill.storage.stores.block_cache import open_object
from draftmill.storage.stores.store import Place, Store, open_store

PLAN = "_plan.json"
FOLDER = "plan/"

ROW_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("offset", pa.int64()),
        pa.field("id", pa.string(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("holes", pa.int32(), nullable=False),
        pa.field("error_kind", pa.string()),
        pa.field("sample", pa.int32(), nullable=False),
    ]
)
"""One row per sample: `file` is the number of its input, `row` and `offset` (bytes) its place there; `length` is its canvas
in tokens, `holes` the number of tokens to generate; `error_kind` is set if the row can't be read or tokenized; `sample`
says which of its row's samples it is, from 0 (`sampling.n`)."""

TABLE_SCHEMA: pa.Schema = pa.schema([pa.field("unit", pa.int32(), nullable=False), *ROW_SCHEMA])


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of the unit table; see ROW_SCHEMA."""

    unit: int
    file: int
    row: int
    offset: int | None
    id: str
    length: int
    holes: int
    error_kind: str | None
    sample: int = 0


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One file of the unit table: units [first, first + units)."""

    name: str
    first: int
    units: int
    rows: int


def part_name(number: int, epoch: int = 0) -> str:
    return f"{FOLDER}part-{number:05d}-{epoch:04d}.parquet"


def epoch_of(name: str) -> int:
    """The epoch in the name of a part; 0 if it has none."""
    match = re.search(r"-(\d+)\.parquet$", name.removeprefix(f"{FOLDER}part"))
    return int(match[1]) if match and match.start() else 0


def part_bytes(units: Iterable[pa.Table]) -> bytes:
    """Return units (tables of TABLE_SCHEMA) as one Parquet file with one row group each."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        TABLE_SCHEMA,
        compression="zstd",
        use_dictionary=["unit", "file", "error_kind"],
        write_page_checksum=True,
    ) as writer:
        for unit in units:
            writer.write_table(unit, row_group_size=max(1, unit.num_rows))
    return bytes(sink.getvalue().to_pybytes())


class PlanTable:
    """Reads single units of the plan in `store`; caches a few parts' footers, but no rows."""

    def __init__(self, store: Store, parts: Iterable[PlanPart]) -> None:
        self._store = store
        self._parts = tuple(parts)
        self._firsts = [part.first for part in self._parts]

    def unit_rows(self, unit: int) -> list[PlannedRow]:
        """Return the unit's rows in order. Raises StoreError if the plan has no such unit, DamagedRun if it is damaged."""
        index = bisect_right(self._firsts, unit) - 1
        if index < 0 or unit >= self._parts[index].first + self._parts[index].units:
            raise StoreError(f"{self._store.url}: the plan has no unit {unit}")
        part = self._parts[index]
        try:
            table = _open_part(self._store, part).read_row_group(unit - part.first, use_threads=THREADS)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self._store, part, error) from None
        columns = [table.column(name).to_pylist() for name in TABLE_SCHEMA.names]
        return [PlannedRow(*values) for values in zip(*columns, strict=True)]

    def tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield one table per unit, in order; holds one part in memory at a time."""
        for part in self._parts:
            try:
                opened = _opened(pa.BufferReader(self._store.get(part.name)), part)
                for group in range(opened.num_row_groups):
                    yield opened.read_row_group(group, columns=columns, use_threads=THREADS)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(self._store, part, error) from None


def parts_of(listed: Iterable[Mapping[str, Any]]) -> tuple[PlanPart, ...]:
    """The parts as `_plan.json` lists them."""
    return tuple(PlanPart(part["name"], part["first"], part["units"], part["rows"]) for part in listed)


def _damaged(store: Store, part: PlanPart, reason: object) -> DamagedRun:
    return DamagedRun(f"{store.url}/{part.name}", reason, "use another output.path: a run can't do without its plan")


@lru_cache(maxsize=4)
def _open_part(store: Store, part: PlanPart) -> pq.ParquetFile:
    return _opened(open_object(store, part.name), part)


def _opened(source: Any, part: PlanPart) -> pq.ParquetFile:
    """The file; pa.ArrowInvalid or OSError if it is not a part of a unit table with so many units."""
    file = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
    there = {(field.name, field.type) for field in file.schema_arrow}
    if not there >= {(field.name, field.type) for field in TABLE_SCHEMA}:
        raise pa.ArrowInvalid("it lacks columns of a unit table")
    if file.num_row_groups != part.units:
        raise pa.ArrowInvalid(f"it has {file.num_row_groups:,} units, the plan {part.units:,}")
    return file


# ---- the texts of a finished run by id and sample: what `decoder.drafter: {kind: run}` reads
#
# The plan of each pass lists the rows of its units in the order of their files, so ids are read from there. A later pass decoded
# the failed rows of the one before it again and comes first. Of a file of results only the wanted column is read; units that
# are packed alike read each file once.

MOST_FILES = 64
"""Files of results whose texts are kept."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The passes of a finished run, the last one first, each its run directory and the parts of its plan. `column` has what is
    used of a row: its `tokens`, or its `text`, where the run's tokenizer was another one."""

    passes: tuple[tuple[Place, tuple[PlanPart, ...]], ...]
    column: Literal["tokens", "text"]


class RunTexts:
    """Looks rows up. Ids are read when the first row is asked for."""

    def __init__(self, run: FinishedRun) -> None:
        self._stores = [open_store(place) for place, _ in run.passes]
        self._parts, self._column = [parts for _, parts in run.passes], run.column
        self._texts = lru_cache(maxsize=MOST_FILES)(self._read_texts)

    def find(self, rows: Sequence[tuple[str, int]]) -> list[Any]:
        """The value of each row (id, sample); None if the run has none. Raises DamagedRun and StoreError."""
        names, starts, files = self._index
        wanted = _names(pa.array([name for name, _ in rows], pa.string()), pa.array([n for _, n in rows], pa.int32()))
        places = pc.fill_null(pc.index_in(wanted, value_set=names), -1).to_numpy()
        found = []
        for place, file in zip(places.tolist(), np.searchsorted(starts, places, "right") - 1, strict=True):
            found.append(None if place < 0 else self._texts(*files[file])[place - starts[file]].as_py())
        return found

    @cached_property
    def _index(self) -> tuple[pa.Array, np.ndarray, list[tuple[int, int, int]]]:
        """The names of all rows, where each file's begin, and of each file its pass, its unit and its number of rows."""
        units = list(self._units())
        starts = np.cumsum([0, *(len(names) for _, names in units)])[:-1]
        names = pa.concat_arrays([names for _, names in units]) if units else pa.array([], pa.string())
        return names, starts, [file for file, _ in units]

    def _units(self) -> Iterator[tuple[tuple[int, int, int], pa.Array]]:
        for number, (store, parts) in enumerate(zip(self._stores, self._parts, strict=True)):
            for unit, table in enumerate(PlanTable(store, parts).tables(["id", "sample"])):
                yield (
                    (number, unit, table.num_rows),
                    _names(table["id"].combine_chunks(), table["sample"].combine_chunks()),
                )

    def _read_texts(self, number: int, unit: int, rows: int) -> pa.ChunkedArray:
        store, name = self._stores[number], unit_name(unit)
        try:
            file = pq.ParquetFile(open_object(store, name), pre_buffer=False, page_checksum_verification=True)
            column = file.read(columns=[self._column], use_threads=THREADS)[self._column]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise damage_error(store, name, error) from None
        if len(column) != rows:
            raise damage_error(store, name, f"it has {len(column):,} rows, the plan {rows:,}")
        return column


def _names(ids: pa.Array, samples: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(pc.cast(samples, pa.string()), ids, ":")
