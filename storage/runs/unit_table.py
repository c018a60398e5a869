"""The unit table of a run directory, which lists the rows of each unit. The planner writes it, workers read it.

    plan/part-00000-0001.parquet     one row group per unit, units in order; a part holds a few hundred units
    _plan.json                       names the parts, among other facts, and is written last

The second number of a part is the epoch of the driver that wrote it: a driver that resumes late can't change another's parts.

A worker reads a part's footer once and then one row group per unit. Knows nothing of specs and models.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.storage.arrow_validation import THREADS
from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.stores.block_cache import open_object
from draftmill.storage.stores.interface import Store

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
    """The name of a part in the run directory."""
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
