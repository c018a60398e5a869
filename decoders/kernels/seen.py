"""What the flat rows of a forward see of the slot cache, and how a kernel cuts the rows into tiles. Made once a forward.

A row sees the columns of its slot that lie in at least one of its intervals; under a sliding window only those of them whose
position is close enough behind its own.

A tile is up to `rows_at_once` rows of one slot that follow each other. The table of tiles is made on the device; its size depends
on the number of rows alone, so that nothing waits and the same launch fits every forward of as many rows.

    rows     0 1 2 3 4 5 6 7        slots  a a a a a b c c       two rows at once
    tiles    0   2   4 5 6          first rows; the places that are left hold N, and their tiles do nothing

Legend: N flat rows, I intervals of a row, S slots, W columns, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MOST_LINES: Final = 128
"""Queries of a tile, which are its rows times the heads of a group, as far as they fit into a program's registers."""
_TILE_BYTES: Final = 32 * 1024


def most_lines(width: int, dtype: torch.dtype) -> int:
    """The queries of the largest tile for heads of this width: a power of two, at most MOST_LINES. They take a third of the
    shared memory that a program has on every GPU since Ampere; the rest is for keys and values."""
    return max(16, min(MOST_LINES, _TILE_BYTES // line_bytes(width, dtype)))


def line_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of a query, key or value of one head in shared memory, where its numbers are filled up to a power of two."""
    return max(16, power_of_two(width)) * dtype.itemsize


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Seen:
    """`slot_N`, `low_IN` and `high_IN` are integers: row n sees the columns [low, high) of each interval, none if low >= high.
    `position_N` and `positions_SW` are the positions of rows and of columns; windows and relative scores read them. `first_T`
    and `rows_at_once` say how kernels cut the rows (see above); references ignore them."""

    slot_N: Tensor
    low_IN: Tensor
    high_IN: Tensor
    position_N: Tensor | None
    positions_SW: Tensor | None
    first_T: Tensor
    rows_at_once: int

    @classmethod
    def of(
        cls,
        slot_N: Tensor,
        low_IN: Tensor,
        high_IN: Tensor,
        *,
        position_N: Tensor | None = None,
        positions_SW: Tensor | None = None,
        rows_at_once: int = 1,
        group: int = 1,
        lines: int = MOST_LINES,
    ) -> Seen:
        """Make the table of tiles. `rows_at_once` is about the number of rows of a slot, as far as their queries fit into a
        tile. `group` is the number of query heads of a key head, `lines` the most queries of a tile (`most_lines`)."""
        rows = max(1, min(rows_at_once, lines // group))
        low_IN, high_IN = low_IN.to(torch.int32), high_IN.to(torch.int32)
        return cls(slot_N, low_IN, high_IN, position_N, positions_SW, first_rows(slot_N, rows), rows)

    def part(self, rows: slice) -> Seen:
        """The same for some of the rows."""
        return Seen.of(
            self.slot_N[rows],
            self.low_IN[:, rows],
            self.high_IN[:, rows],
            position_N=None if self.position_N is None else self.position_N[rows],
            positions_SW=self.positions_SW,
            rows_at_once=self.rows_at_once,
        )

    def visible_NW(self, num_columns: int, window: int | None) -> Tensor:  # noqa: N802
        """Which columns each row sees, as a mask."""
        column_W = torch.arange(num_columns, device=self.slot_N.device)
        inside = (column_W >= self.low_IN.unsqueeze(2)) & (column_W < self.high_IN.unsqueeze(2))
        visible_NW = inside.any(0)
        if window is None:
            return visible_NW
        assert self.position_N is not None and self.positions_SW is not None, "a window reads positions"
        return visible_NW & (self.positions_SW[self.slot_N, :num_columns] > self.position_N.unsqueeze(1) - window)


def first_rows(slot_N: Tensor, rows_at_once: int) -> Tensor:
    """The first row of each tile, int32 [N]; N where there is no tile."""
    count = slot_N.shape[0]
    row_N = torch.arange(count, device=slot_N.device)
    if rows_at_once == 1:
        return row_N.to(torch.int32)
    starts_N = torch.ones_like(row_N, dtype=torch.bool)
    starts_N[1:] = slot_N[1:] != slot_N[:-1]
    run_N = torch.where(starts_N, row_N, 0).cummax(0).values
    opens_N = (row_N - run_N) % rows_at_once == 0
    # Tiles come in the order of their rows: the others are sorted behind them.
    first_N = torch.where(opens_N, row_N, count).sort().values
    return first_N.to(torch.int32)
