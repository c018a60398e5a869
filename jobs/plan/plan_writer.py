"""Packs rows into windows and units and writes the unit table in parts. Holds one window and one part in memory.

Knows only lengths and ids, not where they come from.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.actors.planning.beginnings import BEGINNING
from draftmill.jobs.plan.packing import WINDOW_TOKENS, auto_unit_rows, by_beginning, cut, longest_first, window_rows
from draftmill.storage.failpoints import failpoint
from draftmill.storage.runs.unit_table import (
    FOLDER,
    ROW_SCHEMA,
    TABLE_SCHEMA,
    PlanPart,
    epoch_of,
    part_bytes,
    part_name,
)
from draftmill.storage.stores.interface import Store

PART_UNITS = 256
"""Units per part: keeps a part's footer, which a worker reads whole, to a few hundred kilobytes."""


@dataclass(slots=True)
class UnitSums:
    """Rows and canvas tokens of every unit, twelve bytes per unit, and the first unit of every window."""

    rows: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    windows: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class PlanTotals:
    """Sums over a plan; `errors` counts rows that can't be read or tokenized, by kind."""

    rows: int = 0
    tokens: int = 0
    holes: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table of ROW_SCHEMA."""
        self.rows += table.num_rows
        self.tokens += pc.sum(table["length"]).as_py() or 0
        self.holes += pc.sum(table["holes"]).as_py() or 0
        if table["error_kind"].null_count < table.num_rows:
            for pair in pc.value_counts(table["error_kind"].drop_null()).to_pylist():
                self.errors[pair["values"]] = self.errors.get(pair["values"], 0) + pair["counts"]


class PlanWriter:
    """Takes tables of ROW_SCHEMA in input order and writes the parts. If `unit_rows` is None, the first window decides it.

    If the tables have the column BEGINNING, which is not written, rows that begin alike come together. With `keep_order`, windows
    are not sorted: rows stay in input order. `epoch` is the planning driver's.
    """

    def __init__(
        self, store: Store, *, window: int, unit_rows: int | None = None, keep_order: bool = False, epoch: int = 0
    ) -> None:
        self.parts: list[PlanPart] = []
        self.totals = PlanTotals()
        self.sums = UnitSums()
        self.unit_rows = unit_rows
        self._store = store
        self._window = window
        self._keep_order = keep_order
        self._epoch = epoch
        self._held: list[pa.Table] = []
        self._held_rows = self._held_tokens = 0
        self._units: list[tuple[pa.Table, int, int]] = []  # rows [start, end) of a window

    def add(self, rows: pa.Table) -> None:
        """Add rows, in tables of any size, all with the same columns."""
        assert rows.select(ROW_SCHEMA.names).schema.equals(ROW_SCHEMA), rows.schema
        self._hold(rows)
        while self._held_rows >= self._window or self._held_tokens >= WINDOW_TOKENS:
            held = pa.concat_tables(self._held)
            end = window_rows(held["length"].to_numpy(), self._window)
            self._let_go()
            self._close_window(held.slice(0, end))
            self._hold(held.slice(end))

    def finish(self) -> None:
        """Pack the remaining rows and write the last part."""
        if self._held_rows:
            self._close_window(pa.concat_tables(self._held))
        self._let_go()
        self._write_part()

    def discard(self) -> None:
        """See `discard_parts`."""
        discard_parts(self._store, self._epoch)

    def unit_table(self) -> list[dict[str, Any]]:
        """The parts, the sizes of their units and the first units of windows, as `_plan.json` lists them; lists are arrays."""
        listed = []
        for part in self.parts:
            end = part.first + part.units
            units, windows = slice(part.first, end), self.sums.windows
            sizes = {"unit_rows": self.sums.rows[units], "unit_tokens": self.sums.tokens[units]}
            sizes["windows"] = windows[bisect_left(windows, part.first) : bisect_left(windows, end)]
            listed.append(asdict(part) | sizes)
        return listed

    def _hold(self, rows: pa.Table) -> None:
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_tokens += pc.sum(rows["length"]).as_py() or 0

    def _let_go(self) -> None:
        self._held, self._held_rows, self._held_tokens = [], 0, 0

    def _close_window(self, rows: pa.Table) -> None:
        self.totals.add(rows)
        if self.unit_rows is None:
            self.unit_rows = auto_unit_rows(rows.num_rows)
        lengths = rows["length"].to_numpy()
        order, depth = self._order_of(rows, lengths, self.unit_rows)
        ordered = rows.select(ROW_SCHEMA.names).take(pa.array(order)).combine_chunks()
        units = cut(lengths[order], max_rows=self.unit_rows, depth=depth)
        sizes = [end - start for start, end in units]
        self.sums.windows.append(len(self.sums.rows))
        numbers = np.repeat(np.arange(len(self.sums.rows), len(self.sums.rows) + len(units), dtype=np.int32), sizes)
        numbered = ordered.add_column(0, TABLE_SCHEMA.field("unit"), pa.array(numbers))
        sums = np.concatenate([[0], np.cumsum(lengths[order].astype(np.int64))])
        for start, end in units:
            self._close_unit(numbered, start, end, int(sums[end] - sums[start]))

    def _order_of(
        self, rows: pa.Table, lengths: NDArray[np.int32], unit_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The order of a window's rows, and the depth of their groups, None without groups."""
        if self._keep_order:
            return np.arange(len(lengths)), None
        if BEGINNING.name in rows.column_names:
            return by_beginning(lengths, rows[BEGINNING.name], max_rows=unit_rows)
        return longest_first(lengths), None

    def _close_unit(self, window: pa.Table, start: int, end: int, tokens: int) -> None:
        self.sums.rows.append(end - start)
        self.sums.tokens.append(tokens)
        self._units.append((window, start, end))
        if len(self._units) == PART_UNITS:
            self._write_part()

    def _write_part(self) -> None:
        if not self._units:
            return
        name, units = part_name(len(self.parts), self._epoch), len(self._units)
        failpoint("plan.before_part")
        self._store.put(name, part_bytes(window.slice(start, end - start) for window, start, end in self._units))
        rows = sum(end - start for _, start, end in self._units)
        self.parts.append(PlanPart(name, len(self.sums.rows) - units, units, rows))
        self._units = []


def discard_parts(store: Store, epoch: int) -> None:
    """Delete the parts of abandoned plans, of this driver (`epoch`) or an earlier one; never those of a later driver."""
    for stat in list(store.list(FOLDER)):
        if epoch_of(stat.name) <= epoch:
            store.delete(stat.name)
