"""The slot cache: the keys and values of every layer at [slot, key head, column], and the position of every column.

Slots are independent and ragged: each forward writes its own rows at columns of their slots. Old columns stay until they are
overwritten, so a rejected column needs no cropping. The cache does not know which columns a row may see. Slots that follow each
other are read in place; any other selection must be copied out.

Where kernels read it, the cache is one pool of cells a layer, each with all heads. A slot has some cells that follow each other:
as many as its canvas needs, from where the engine places it (`place`), or equally many in all slots (`resize`). While the pool is
large enough its memory stays where it is, and so do graphs that read it. Its last cell is no slot's: rows that fill up a forward
write there.

Legend: B slots read, K key heads, X = 2 K keys and values, C cells.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.rows import TokenRows


class SlotCache:
    """Keys and values of `num_layers` layers. Methods that Model has, too, are explained there."""

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pooled: bool = False,
    ) -> None:
        empty = torch.zeros(2, 0, num_heads, 0, head_width, dtype=dtype, device=device)
        self.layers_2SKWd = [empty] * num_layers
        """Keys and values, [2, S, K, W, d]; of a pooled cache all cells as one slot."""
        self.positions_SW = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.is_pooled = pooled
        self.pools_2CKd: list[Tensor]
        """One pool of cells a layer; none where the cache is not pooled."""
        # Of a pooled cache the first cell and the number of columns of each slot; and, which graphs read, the first cells of
        # slots that are equally wide.
        self._places: list[tuple[int, int]]
        self._starts_S: Tensor
        self._free()

    def _free(self) -> None:
        self.layers_2SKWd = [layer[:, :0, :, :0].clone() for layer in self.layers_2SKWd]
        self.pools_2CKd = [layer.transpose(2, 3).flatten(1, 2) for layer in self.layers_2SKWd if self.is_pooled]
        self.positions_SW = self.positions_SW[:0, :0].clone()
        self.num_slots = self.num_columns = 0
        self._places, self._starts_S = [], self.positions_SW.flatten()
        self._note_offsets()

    def _note_offsets(self) -> None:
        """How far the cells of each head's key and value are from that of the first head's key."""
        _, num_slots, num_heads, num_columns, _ = self.layers_2SKWd[0].shape
        heads_K = torch.arange(num_heads, device=self.positions_SW.device) * num_columns
        self._offsets_X = torch.cat([heads_K, heads_K + num_slots * num_heads * num_columns])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values, which is that of the model's large products."""
        return self.layers_2SKWd[0].dtype

    @property
    def cell_bytes(self) -> int:
        """Bytes of one column of one slot, in all layers."""
        layers = sum(2 * layer.shape[2] * layer.shape[4] * layer.element_size() for layer in self.layers_2SKWd)
        return layers + self.positions_SW.element_size()

    def resize(self, num_slots: int, num_columns: int) -> None:
        if self.is_pooled:
            self._lay_out(num_slots, num_columns)
        elif (self.num_slots, self.num_columns) != (num_slots, num_columns):
            self._remake(num_slots, num_columns)
            self.num_slots, self.num_columns = num_slots, num_columns
            self._note_offsets()

    def _remake(self, num_slots: int, num_columns: int) -> None:
        """One layer at a time, so that the old and the new cache are never both whole in memory."""
        try:
            for index, layer in enumerate(self.layers_2SKWd):
                if self.is_pooled:
                    pool = self.pools_2CKd[index] = _resize(self.pools_2CKd[index], 1, 2, num_columns, layer.shape[2])
                    self.layers_2SKWd[index] = pool.unsqueeze(1).transpose(2, 3)
                else:
                    self.layers_2SKWd[index] = _resize(layer, 1, 3, num_slots, num_columns)
            self.positions_SW = _resize(self.positions_SW, 0, 1, num_slots, num_columns)
        except BaseException:
            self._free()
            raise

    def stays(self, num_slots: int, num_columns: int) -> bool:
        if self.is_pooled and num_slots * num_columns:
            return num_slots * num_columns <= self.dead_cell and num_slots <= len(self._starts_S)
        return (self.num_slots, self.num_columns) == (num_slots, num_columns)

    @property
    def dead_cell(self) -> int:
        return self.positions_SW.shape[1] - 1

    def reserve(self, num_cells: int) -> None:
        """Does nothing unless the pool is empty. If memory runs out, it has no cells: it then grows by need."""
        if self.is_pooled and not self.num_slots:
            with suppress(torch.OutOfMemoryError):
                self._grow(num_cells)

    def spread(self, num_slots: int, num_columns: int) -> None:
        self._places += [(0, 0)] * (num_slots - len(self._places))
        self._starts_S = self._starts_S[:0]
        self.num_slots, self.num_columns = num_slots, num_columns

    def place(self, slot: int, start: int, num_columns: int) -> bool:
        """See Model; False if the pool had to grow, and has moved."""
        self._places[slot] = start, num_columns
        stays = start + num_columns <= self.dead_cell
        if not stays:
            self._grow(max(start + num_columns, self.dead_cell * 3 // 2))
        return stays

    def _lay_out(self, num_slots: int, num_columns: int) -> None:
        """Give each slot equally many cells, one behind the other."""
        if not num_slots * num_columns:
            self._free()
            return
        self._grow(num_slots * num_columns)
        old, self._places = self._places, [(slot * num_columns, num_columns) for slot in range(num_slots)]
        if old == self._places and len(self._starts_S):
            return
        moves = [
            (start, now, min(count, num_columns))
            for (start, count), (now, _) in zip(old, self._places, strict=False)
            if start != now
        ]
        for pool in [*self.pools_2CKd, self.positions_SW]:
            kept = [pool[:, start : start + count].clone() for start, _, count in moves]
            for part, (_, now, count) in zip(kept, moves, strict=True):
                pool[:, now : now + count] = part
        if num_slots > len(self._starts_S):
            self._starts_S = self._starts_S.new_zeros(num_slots)
        self._starts_S.copy_(torch.arange(len(self._starts_S), device=self._starts_S.device) * num_columns)
        self.num_slots, self.num_columns = num_slots, num_columns

    def _grow(self, num_cells: int) -> None:
        """Have at least this many cells and one more; what they hold stays."""
        if num_cells > self.dead_cell:
            self._remake(1, num_cells + 1)

    def cells(self, slots_N: Tensor, columns_N: Tensor, starts_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of a pooled cache: the cell at which each row's slot begins, given where slots are placed, and that of its column, [N]
        each."""
        if starts_N is None:
            starts_N = self._starts_S.index_select(0, slots_N)
        return starts_N, starts_N + columns_N

    def _extent(self, slot: int) -> tuple[int, int, int]:
        """Where a slot is in `layers_2SKWd`: among the slots there, its first column, and how many it has."""
        return (0, *self._places[slot]) if self.is_pooled else (slot, 0, self.num_columns)

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        (there, start, _), (here, first, _) = self._extent(source), self._extent(target)
        theirs, own = slice(start, start + num_columns), slice(first, first + num_columns)
        for layer in self.layers_2SKWd:
            layer[:, here, :, own] = layer[:, there, :, theirs]
        self.positions_SW[here, own] = self.positions_SW[there, theirs]

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        if self.is_pooled:
            starts_R = self._starts_S.index_select(0, slots_R) if len(self._starts_S) else 0
            slots_R, from_R, to_R = torch.zeros_like(slots_R), starts_R + from_R, starts_R + to_R
        for layer in self.layers_2SKWd:
            layer[:, slots_R, :, to_R] = layer[:, slots_R, :, from_R]
        self.positions_SW[slots_R, to_R] = self.positions_SW[slots_R, from_R]

    def clear_slot(self, slot: int) -> None:
        slot, start, count = self._extent(slot)
        for layer in self.layers_2SKWd:
            layer[:, slot, :, start : start + count] = 0

    def set_positions(self, slot: int, positions_L: Tensor) -> None:
        slot, start, _ = self._extent(slot)
        self.positions_SW[slot, start : start + len(positions_L)] = positions_L

    def places(self, slots_N: Tensor, columns_N: Tensor, positions_N: Tensor | None = None) -> Tensor:
        """Of a cache that is not pooled: the cells for each row's keys and values, for `write`; int64 [N * 2 K], for any layer.
        Notes the rows' positions if there are any; all rows must have different cells."""
        if positions_N is not None:
            cells_N = torch.add(columns_N, slots_N, alpha=self.num_columns)
            self.positions_SW.view(-1).index_copy_(0, cells_N, positions_N)
        per_slot = self.layers_2SKWd[0].shape[2] * self.num_columns
        first_N1 = torch.add(columns_N, slots_N, alpha=per_slot).unsqueeze(1)
        return (first_N1 + self._offsets_X).flatten()

    def add_layer(self, width: int) -> None:
        """Give an empty cache one more layer, which holds `width` numbers a column."""
        held = self.layers_2SKWd[0]
        empty = held.new_zeros(2, 0, held.shape[2], 0, -(-width // (2 * held.shape[2])))
        self.layers_2SKWd.append(empty)
        if self.is_pooled:
            self.pools_2CKd.append(empty.transpose(2, 3).flatten(1, 2))

    def places_of(self, rows: TokenRows, columns_N: Tensor) -> Tensor:
        """Where `write` puts rows at these columns, in a pooled cache or another one."""
        if self.is_pooled:
            return self.cells(rows.slot_N, columns_N, rows.start_N)[1]
        return self.places(rows.slot_N, columns_N)

    def write_rows(self, layer: int, rows: TokenRows, rows_ND: Tensor) -> None:
        """Store states of rows in a layer that was added."""
        _, _, num_heads, _, width = self.layers_2SKWd[layer].shape
        full_NF = functional.pad(rows_ND, (0, 2 * num_heads * width - rows_ND.shape[1]))
        self.write(layer, self.places_of(rows, rows.column_N), full_NF.view(-1, 2 * num_heads, width))

    def read_rows(self, layer: int, rows: TokenRows, columns_N: Tensor, width: int) -> Tensor:
        """What a layer that was added holds at these columns, [N, width]."""
        places = self.places_of(rows, columns_N)
        if self.is_pooled:
            rows_NF = self.pools_2CKd[layer].index_select(1, places).transpose(0, 1).flatten(1)
        else:
            held = self.layers_2SKWd[layer]
            rows_NF = held.view(-1, held.shape[4]).index_select(0, places).view(len(columns_N), -1)
        return rows_NF[:, :width]

    def write(self, layer: int, places: Tensor, key_value_NXd: Tensor) -> None:
        """Store rows in one layer, each with the keys and then the values of its heads; all rows must have different cells. The
        `places` are those of `places`, or `cells` of a pooled cache."""
        width = key_value_NXd.shape[2]
        if self.is_pooled:
            for pool_CKd, rows_NKd in zip(self.pools_2CKd[layer], key_value_NXd.chunk(2, 1), strict=True):
                pool_CKd.index_copy_(0, places, rows_NKd)
            return
        self.layers_2SKWd[layer].view(-1, width).index_copy_(0, places, key_value_NXd.reshape(-1, width))

    def read_in_order(self, layer: int, slots_B: Tensor, column_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of some columns of each slot, in their order, [B, K, W, d] each; copies."""
        held_2SKWd = self.layers_2SKWd[layer]
        num_heads, width = held_2SKWd.shape[2], held_2SKWd.shape[4]
        head_BK = slots_B.unsqueeze(1) * num_heads + torch.arange(num_heads, device=slots_B.device)
        cell_BKW = head_BK.unsqueeze(2) * self.num_columns + column_BW.unsqueeze(1)
        cells_2Xd = held_2SKWd.view(2, -1, width).index_select(1, cell_BKW.flatten())
        key, value = cells_2Xd.view(2, *cell_BKW.shape, width).unbind(0)
        return key, value

    def read(self, layer: int, slots: Tensor | slice, num_columns: int) -> tuple[Tensor, Tensor]:
        """Return the first columns of the keys and the values of slots, [B, K, num_columns, d]; views where they are a slice."""
        held_2SKWd = self.layers_2SKWd[layer]
        if isinstance(slots, slice):
            key, value = held_2SKWd[:, slots, :, :num_columns].unbind(0)
            return key, value
        near = held_2SKWd[:, :, :, :num_columns]
        return near[0].index_select(0, slots), near[1].index_select(0, slots)


def _resize(held: Tensor, slot_dim: int, column_dim: int, num_slots: int, num_columns: int) -> Tensor:
    """A copy of a tensor with other numbers of slots and columns; new cells are zero."""
    shape = list(held.shape)
    shape[slot_dim], shape[column_dim] = num_slots, num_columns
    new = held.new_zeros(shape)
    both = [slice(None)] * held.dim()
    both[slot_dim] = slice(0, min(num_slots, held.shape[slot_dim]))
    both[column_dim] = slice(0, min(num_columns, held.shape[column_dim]))
    new[tuple(both)] = held[tuple(both)]
    return new


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
