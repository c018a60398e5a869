"""What the flat rows of a forward see of the slot cache, and how a kernel cuts the rows into tiles.

A row sees the columns of its slot that lie in at least one of its intervals; under a sliding window only those of them whose
position is close enough behind its own.

A tile is some rows of one slot that follow each other, with the query heads of one key head: its lines. Tiles have a few sizes,
whatever the rows are, so that a kernel is compiled a few times. The host knows the number of rows of each slot, and makes the
tables: one of small tiles for the slots with few rows, one of the largest tiles for the others, each with its own launch.

    rows     0 1 2 3 4 5 6 7        slots  a a a a a b c c       tiles of two rows, and of eight
    few      5 6                    first rows of the tiles of b and c
    many     0                      that of a

Legend: N flat rows, I intervals of a row, S slots, W columns, T tiles, B slots of the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_LINES: Final = 128
# Lines of a tile of few rows: what tensor cores multiply at a time, and what still takes less time than to read the keys.
_FEW_LINES: Final = (16, 64)
# Of the 99 KiB of shared memory that a program has on every GPU since Ampere (8.6, 8.9 and 12.0 have the least) a tile's queries
# take 32, and two stages of keys and values twice as much; Turing has 64 KiB, and fewer registers for what it multiplies.
_AMPERE: Final = (8, 0)
_TILE_BYTES: Final = 32 * 1024
# Products of float32 are made without tensor cores, from numbers in registers, and scores of distances take registers too: larger
# tiles spill them.
_MOST_WIDE_LINES: Final = 32
_MOST_RELATIVE_LINES: Final = 64


class Tables(NamedTuple):
    """The tiles of a forward: for each kind its lines and the first row of each tile, integers [T]. A number beyond the rows
    stands for no tile."""

    lines: tuple[int, ...]
    first_T: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """The sizes of the tiles of a kind of head: `group` query heads read a key head, the largest tile has `most` lines, those of
    slots with few rows one of the `few` sizes."""

    group: int = 1
    most: int = _MOST_LINES
    few: tuple[int, ...] = _FEW_LINES

    @classmethod
    def of(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        *,
        group: int,
        width: int,
        relative: bool = False,
        fixed: bool = False,
    ) -> Tiling:
        """For heads of this width: the largest tile that a device's shared memory holds beside keys and values. `relative`: the
        model adds a score that depends on distances. `fixed`: all tiles have one size, by which a row's bits are the same in any
        batch."""
        most = _MOST_RELATIVE_LINES if relative else _MOST_LINES
        most = _MOST_WIDE_LINES if dtype == torch.float32 else most
        most = max(16, min(most, tile_bytes(device) // line_bytes(width, dtype)))
        return cls(group, min(most, _FEW_LINES[-1]), ()) if fixed else cls(group, most)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of a tile, in lines, ascending."""
        least = power_of_two(self.group)
        return tuple(sorted({max(least, lines) for lines in (*self.few, self.most) if lines <= self.most}))

    def rows(self, lines: int) -> int:
        return lines // self.group

    def most_tiles(self, lines: int, num_runs: int, num_rows: int) -> int:
        """The most tiles of this size for `num_rows` rows in `num_runs` runs, each of one slot or of dead rows."""
        return min(num_rows, num_runs + num_rows // self.rows(lines))

    def cut(self, line_N: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """The first rows of the tiles by their lines. Row n is row number `line_N[n]` of its slot, whose rows follow each other.
        Rows below zero are dead: they see nothing, and get zeros in one kind of tile or the other."""
        begins_N, is_dead_N = line_N == 0, line_N < 0
        begins_N[1:] |= is_dead_N[1:] & ~is_dead_N[:-1]
        begins_N[:1] |= is_dead_N[:1]
        first_B = np.flatnonzero(begins_N)
        end_B = np.append(first_B[1:], len(line_N))
        is_dead_B = is_dead_N[first_B]
        count_B = np.where(is_dead_B, 0, end_B - first_B)
        *small, most = sizes = self.sizes
        few_B = count_B <= (self.rows(small[-1]) if small else 0)
        if not (few_B & ~is_dead_B).any():
            few_B[:] = False  # dead rows go with the others
        found = {}
        for some_B in (few_B, ~few_B):
            if some_B.any():
                count = int(count_B[some_B].max())
                lines = next((size for size in sizes if count <= self.rows(size)), most)
                found[lines] = _cut_runs(first_B[some_B], end_B[some_B], self.rows(lines))
        return found

    def tables(self, line_N: Tensor) -> Tables:
        """The same on the rows' device. It waits for the device: only for callers outside of the engine."""
        found = self.cut(line_N.cpu().numpy())
        return Tables(tuple(found), tuple(torch.from_numpy(first_T).to(line_N.device) for first_T in found.values()))


def _cut_runs(first_B: NDArray[np.int64], end_B: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """The first row of each tile of `num_rows` rows, over some runs of rows."""
    tiles_B = -(-(end_B - first_B) // num_rows)
    if (tiles_B == 1).all():
        return first_B
    step = np.arange(tiles_B.sum()) - np.repeat(tiles_B.cumsum() - tiles_B, tiles_B)
    return np.repeat(first_B, tiles_B) + step * num_rows


def tile_bytes(device: torch.device) -> int:
    """Bytes of shared memory for the queries of a tile."""
    return _TILE_BYTES // 4 if _is_old(device) else _TILE_BYTES


def _is_old(device: torch.device) -> bool:
    known = device.type == "cuda" and torch.cuda.is_initialized()
    return known and torch.cuda.get_device_capability(device) < _AMPERE


def line_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of a query, key or value of one head in shared memory, where its numbers are filled up to a power of two."""
    return max(16, power_of_two(width)) * dtype.itemsize


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Seen:
    """`slot_N`, `low_IN` and `high_IN` are integers: row n sees the columns [low, high) of each interval, none if low >= high.
    `position_N` and `positions_SW` are the positions of rows and of columns; windows and relative scores read them. Kernels read
    `tables`, whose row numbers count from `skip` rows before the first one here. In a cache that is one pool of cells (SlotCache)
    each row's slot begins at `start_N`, and no slot has more than `num_columns`."""

    slot_N: Tensor
    low_IN: Tensor
    high_IN: Tensor
    position_N: Tensor | None = None
    positions_SW: Tensor | None = None
    tables: Tables | None = None
    start_N: Tensor | None = None
    num_columns: int | None = None
    skip: int = 0

    def after(self, count: int) -> Seen:
        """The same for all rows but the first ones."""
        return replace(
            self,
            slot_N=self.slot_N[count:],
            low_IN=self.low_IN[:, count:],
            high_IN=self.high_IN[:, count:],
            position_N=None if self.position_N is None else self.position_N[count:],
            start_N=None if self.start_N is None else self.start_N[count:],
            skip=self.skip + count,
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
