"""The texts of a finished run by id and sample: what `decoder.drafter: {kind: run}` reads.

The plan of each pass lists the rows of its units in the order of their files, so ids are read from there. A later pass decoded
the failed rows of the one before it again and comes first. Of a file of results only the wanted column is read; units that are
packed alike read each file once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftmill.storage.arrow_validation import THREADS
from draftmill.storage.runs.records import damage_error
from draftmill.storage.runs.unit_facts import unit_name
from draftmill.storage.runs.unit_table import PlanPart, PlanTable
from draftmill.storage.stores.block_cache import open_object
from draftmill.storage.stores.interface import Place
from draftmill.storage.stores.store import open_store

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
