"""Packs rows into windows and units, and writes the unit table in parts. Holds one window and one part in memory.

    window of 10 rows      lengths  7 3 9 1 8 2 6 9 4 5
    sorted, longest first           9 9 8 7 6 5 4 3 2 1
    units of at most 4 rows        [9 9 8 7][6 5 4][3 2 1]      even shares; a token budget may cut earlier

Rows of a unit are of similar length, so a batch of them has little padding. Packing knows only lengths and ids, not where they
come from.

Where a worker computes common beginnings of prompts once (makers.shares_beginnings), rows that begin alike come after one another
(actors/planning/beginnings.py): groups by their longest row, and inside of a group again. A unit then ends where a group ends, if
one does shortly before its limit.

    begin alike                     a a a a b b b c c c     a: the ends of one question
    units of at most 8 rows        [9 6 4 2 8 8 7][5 3 1]   not [.. 5][3 1], though 8 rows would fit
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from draftmill.actors.planning.beginnings import BEGINNING, group_by_beginning
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
from draftmill.storage.stores.store import Store

UNIT_TOKENS = 2**19
"""Maximum tokens of a unit; bounds the memory and time of what is committed, retried and bisected together."""

MIN_UNIT_ROWS, MAX_UNIT_ROWS, UNITS_PER_WINDOW = 32, 1024, 64

WINDOW_TOKENS = UNITS_PER_WINDOW * UNIT_TOKENS
"""Maximum tokens of a window: a unit's rows may be anywhere in it, so a worker may have to read all of it."""

Range = tuple[int, int]


def auto_unit_rows(rows_in_first_window: int) -> int:
    """Rows per unit for `unit_rows: auto`: 64 units in the first window, but 32 to 1024 rows."""
    return min(MAX_UNIT_ROWS, max(MIN_UNIT_ROWS, -(-rows_in_first_window // UNITS_PER_WINDOW)))


def window_rows(lengths: NDArray[np.int32], most: int) -> int:
    """How many of these rows make the next window: `most`, or the fewest that reach WINDOW_TOKENS, whichever is smaller."""
    return min(most, 1 + int(np.searchsorted(np.cumsum(lengths.astype(np.int64)), WINDOW_TOKENS)))


def longest_first(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the order of a window's rows: longest first; a stable sort."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def cut(
    lengths: NDArray[np.int32],
    *,
    max_rows: int,
    max_tokens: int = UNIT_TOKENS,
    depth: NDArray[np.int64] | None = None,
) -> list[Range]:
    """Cut sorted rows into [start, end) units of at most `max_rows` rows and `max_tokens` tokens, in even shares.

    A row that exceeds the token budget forms a unit alone. `depth` is that of `group_by_beginning`: of the places that a unit
    could end at, up to an eighth before its limit, it ends at the last one of the least depth; the rest is shared evenly again.
    """
    total = len(lengths)
    if total == 0:
        return []
    share = _even(total, max_rows)
    sums = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    units: list[Range] = []
    start = 0
    while start < total:
        fits = int(np.searchsorted(sums, sums[start] + max_tokens, side="right")) - 1
        end = max(start + 1, min(fits, start + share, total))
        if depth is not None and end < total:
            least = end - (end - start) // 8
            early = end - int(np.argmin(depth[least : end + 1][::-1]))
            if early < end:
                end = early
                share = _even(total - end, max_rows)
        units.append((start, end))
        start = end
    return units


def _even(rows: int, max_rows: int) -> int:
    """Rows of each unit if so many are shared evenly among as few units as possible."""
    return -(-rows // -(-rows // max_rows))


def padding_efficiency(lengths: NDArray[np.int32], *, batch_rows: int) -> float:
    """Useful over computed tokens for rows in this order, in batches padded to their longest row; 1 if empty."""
    if len(lengths) == 0 or int(lengths.sum()) == 0:
        return 1.0
    batches = range(0, len(lengths), batch_rows)
    computed = sum(int(lengths[at : at + batch_rows].max()) * len(lengths[at : at + batch_rows]) for at in batches)
    return int(lengths.sum()) / computed


PART_UNITS = 256
"""Units per part: keeps a part's footer, which a worker reads whole, to a few hundred kilobytes."""


Count = Annotated[int, Field(ge=0)]


@dataclass(slots=True)
class PlanTotals:
    """Sums over a plan; `errors` counts rows that can't be read or tokenized, by kind."""

    units: Count = 0
    rows: Count = 0
    tokens: Count = 0
    holes: Count = 0
    errors: dict[str, Count] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table of ROW_SCHEMA."""
        self.rows += table.num_rows
        self.tokens += pc.sum(table["length"]).as_py() or 0
        self.holes += pc.sum(table["holes"]).as_py() or 0
        for pair in pc.value_counts(table["error_kind"].drop_null()).to_pylist():
            self.errors[pair["values"]] = self.errors.get(pair["values"], 0) + pair["counts"]


class PlanWriter:
    """Takes tables of ROW_SCHEMA in input order and writes the parts. With `unit_rows: auto` the first window decides it.

    If the tables have the column BEGINNING, which is not written, rows that begin alike come together. With `keep_order`, windows
    are not sorted: rows stay in input order. `epoch` is the planning driver's.
    """

    def __init__(
        self,
        store: Store,
        *,
        window: int,
        unit_rows: int | Literal["auto"] = "auto",
        keep_order: bool = False,
        epoch: int = 0,
    ) -> None:
        self.totals = PlanTotals()
        self.unit_rows = unit_rows
        self.parts: list[dict[str, Any]] = []  # as `_plan.json` lists them: twelve bytes a unit
        self._store = store
        self._window = window
        self._keep_order = keep_order
        self._epoch = epoch
        self._held: list[pa.Table] = []
        self._held_rows = self._held_tokens = 0
        self._units: list[tuple[pa.Table, int, int, int]] = []  # rows [start, end) of a window, and their tokens

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

    def _hold(self, rows: pa.Table) -> None:
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_tokens += pc.sum(rows["length"]).as_py() or 0

    def _let_go(self) -> None:
        self._held, self._held_rows, self._held_tokens = [], 0, 0

    def _close_window(self, rows: pa.Table) -> None:
        self.totals.add(rows)
        if self.unit_rows == "auto":
            self.unit_rows = auto_unit_rows(rows.num_rows)
        lengths = rows["length"].to_numpy()
        order, depth = self._order_of(rows, lengths, self.unit_rows)
        ordered = rows.select(ROW_SCHEMA.names).take(pa.array(order)).combine_chunks()
        units = cut(lengths[order], max_rows=self.unit_rows, depth=depth)
        sizes = [end - start for start, end in units]
        first = self.totals.units
        numbers = np.repeat(np.arange(first, first + len(units), dtype=np.int32), sizes)
        numbered = ordered.add_column(0, TABLE_SCHEMA.field("unit"), pa.array(numbers))
        sums = np.concatenate([[0], np.cumsum(lengths[order].astype(np.int64))])
        for start, end in units:
            self.totals.units += 1
            self._units.append((numbered, start, end, int(sums[end] - sums[start])))
            if len(self._units) == PART_UNITS:
                self._write_part()

    def _order_of(
        self, rows: pa.Table, lengths: NDArray[np.int32], unit_rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """The order of a window's rows, and the depth of their groups, None without groups."""
        if self._keep_order:
            return np.arange(len(lengths)), None
        order = longest_first(lengths)
        if BEGINNING.name not in rows.column_names:
            return order, None
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        # Rows of all lengths that have little in common stay apart, unless they fill units by themselves.
        return group_by_beginning(rows[BEGINNING.name], rank, large=unit_rows)

    def _write_part(self) -> None:
        if not self._units:
            return
        name, units = part_name(len(self.parts), self._epoch), len(self._units)
        failpoint("plan.before_part")
        self._store.put(name, part_bytes(window.slice(start, end - start) for window, start, end, _ in self._units))
        first, rows = self.totals.units - units, array("i", (end - start for _, start, end, _ in self._units))
        listed = asdict(PlanPart(name, first, units, sum(rows))) | {"unit_rows": rows}
        listed["unit_tokens"] = array("q", (tokens for *_, tokens in self._units))
        listed["windows"] = array("i", (first + n for n, (_, start, _, _) in enumerate(self._units) if start == 0))
        self.parts.append(listed)
        self._units = []


def discard_parts(store: Store, epoch: int) -> None:
    """Delete the parts of abandoned plans, of this driver (`epoch`) or an earlier one; never those of a later driver."""
    for stat in list(store.list(FOLDER)):
        if epoch_of(stat.name) <= epoch:
            store.delete(stat.name)
