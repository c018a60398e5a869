"""The slot cache: the keys and values of every layer at [slot, key head, column], and the position of every column.

Slots are independent and ragged: each forward writes its own rows at columns of their slots. Old columns stay until they are
overwritten, so a rejected column needs no cropping. The cache does not know which columns a row may see. Slots that follow each
other are read in place; any other selection must be copied out.

Where kernels read it, the cache is one pool of cells a layer, each with all heads, and slot s has the cells from s x W on. Other
numbers of slots and columns are another view of the pool: while it is large enough its memory stays where it is, and so do graphs
that read it, which take W from the device.

Legend: B slots read, K key heads, X = 2 K keys and values, C cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.base import Model

if TYPE_CHECKING:
    from draftmill.decoders.backbones.invariance import ShapeRules
    from draftmill.decoders.kernels.find import Attend


class SlotCache:
    """Keys and values of `num_layers` layers; resizing keeps the content that still fits. `pooled`: see above."""

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
        self.positions_SW = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.is_pooled = pooled
        self.pools_2CKd = [empty.transpose(2, 3).flatten(1, 2)] * num_layers if pooled else []
        """One pool of cells a layer; none where the cache is not pooled."""
        self._positions_C = self.positions_SW.view(-1)
        self._width = torch.zeros((), dtype=torch.int64, device=device)
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
    def num_slots(self) -> int:
        """How many slots there is room for."""
        return self.positions_SW.shape[0]

    @property
    def num_columns(self) -> int:
        """How many columns each slot has."""
        return self.positions_SW.shape[1]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one column of one slot, in all layers."""
        layers = sum(2 * layer.shape[2] * layer.shape[4] * layer.element_size() for layer in self.layers_2SKWd)
        return layers + self.positions_SW.element_size()

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Resize to exactly this many slots and columns; content within them stays. One layer at a time, so that the old and
        the new cache are never both whole in memory. If memory runs out, the layers that were done are restored; if there is no
        memory even for that, the cache becomes empty."""
        before = self.positions_SW.shape
        if before == (num_slots, num_columns):
            return
        if self.is_pooled:
            self._resize_pools(num_slots, num_columns)
            return
        positions, num_done = _resize(self.positions_SW, 0, 1, num_slots, num_columns), 0
        try:
            for index in range(len(self.layers_2SKWd)):
                self.layers_2SKWd[index] = _resize(self.layers_2SKWd[index], 1, 3, num_slots, num_columns)
                num_done += 1
        except BaseException:
            self._go_back(num_done, *before)
            raise
        self.positions_SW = positions
        self._note_offsets()

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """Whether a resize to this leaves its memory where it is."""
        if self.is_pooled and num_slots * num_columns:
            return num_slots * num_columns <= len(self._positions_C)
        return self.positions_SW.shape == (num_slots, num_columns)

    def reserve(self, num_cells: int) -> None:
        """Give an empty pool `num_cells` cells, or none if memory runs out: it then grows by need. A pool with content
        stays, and so does a cache that is not pooled."""
        if self.is_pooled and not self.positions_SW.numel() and num_cells > len(self._positions_C):
            try:
                self._allocate_pools(num_cells)
            except torch.OutOfMemoryError:
                self._allocate_pools(0)

    def _allocate_pools(self, num_cells: int) -> None:
        for index, pool in enumerate(self.pools_2CKd):
            self.pools_2CKd[index] = pool.new_zeros(2, num_cells, *pool.shape[2:])
        self._positions_C = self._positions_C.new_zeros(num_cells)

    def _resize_pools(self, num_slots: int, num_columns: int) -> None:
        """Move what stays to where its slots are now, one layer at a time. If memory runs out, the cache becomes empty."""
        try:
            self._move(num_slots, num_columns)
        except BaseException:
            self._allocate_pools(0)
            self.layers_2SKWd = [layer[:, :0, :, :0].clone() for layer in self.layers_2SKWd]
            self.positions_SW = self.positions_SW[:0, :0].clone()
            raise

    def _move(self, num_slots: int, num_columns: int) -> None:
        needed, before = num_slots * num_columns, self.positions_SW.shape
        grown = needed > len(self._positions_C) or not needed
        both = slice(0, min(num_slots, before[0])), slice(0, min(num_columns, before[1]))
        is_moved = before[1] != num_columns or grown
        positions = self.positions_SW[both].clone()
        if grown:
            self._positions_C = self._positions_C.new_zeros(needed)
        self.positions_SW = self._positions_C[:needed].view(num_slots, num_columns)
        for index, held in enumerate(self.layers_2SKWd):
            kept = held[:, both[0], :, both[1]].clone() if is_moved else None
            if grown:
                self.layers_2SKWd[index] = held[:, :0]
                pool = self.pools_2CKd[index]
                self.pools_2CKd[index] = pool[:, :0].clone()
                self.pools_2CKd[index] = pool.new_zeros(2, needed, *pool.shape[2:])
            pool = self.pools_2CKd[index]
            view = pool[:, :needed].unflatten(1, (num_slots, num_columns)).transpose(2, 3)
            if kept is not None:
                view[:, both[0], :, both[1]] = kept
            self.layers_2SKWd[index] = view
        self.positions_SW[both] = positions
        self._width.fill_(num_columns)

    def cells(self, slots_N: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
        """Of a pooled cache: the cell at which each row's slot begins, and that of its column, int64 [N] each."""
        starts_N = slots_N * self._width
        return starts_N, starts_N + columns_N

    def _go_back(self, num_done: int, num_slots: int, num_columns: int) -> None:
        try:
            for index in range(num_done):
                self.layers_2SKWd[index] = _resize(self.layers_2SKWd[index], 1, 3, num_slots, num_columns)
        except (RuntimeError, MemoryError):
            self.layers_2SKWd = [layer[:, :0, :, :0].clone() for layer in self.layers_2SKWd]
            self.positions_SW = self.positions_SW[:0, :0].clone()

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of slot `source` onto those of slot `target`; its others stay."""
        for layer in self.layers_2SKWd:
            layer[:, target, :, :num_columns] = layer[:, source, :, :num_columns]
        self.positions_SW[target, :num_columns] = self.positions_SW[source, :num_columns]

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """Copy columns of slots onto others of the same slots; none is both read and written."""
        for layer in self.layers_2SKWd:
            layer[:, slots_R, :, to_R] = layer[:, slots_R, :, from_R]
        self.positions_SW[slots_R, to_R] = self.positions_SW[slots_R, from_R]

    def clear_slot(self, slot: int) -> None:
        """Put zeros into a slot."""
        for layer in self.layers_2SKWd:
            layer[:, slot] = 0

    def places(self, slots_N: Tensor, columns_N: Tensor) -> Tensor:
        """Return the cells for each row's keys and values, for `write`; int64 [N * 2 K], for any layer."""
        assert not self.is_pooled, "rows of a pooled cache go to `cells`"
        per_slot = self.layers_2SKWd[0].shape[2] * self.num_columns
        first_N1 = torch.add(columns_N, slots_N, alpha=per_slot).unsqueeze(1)
        return (first_N1 + self._offsets_X).flatten()

    def note_positions(self, slots_N: Tensor, columns_N: Tensor, positions_N: Tensor) -> None:
        """Note the positions of rows that are written; all rows must have different cells."""
        cells_N = torch.add(columns_N, slots_N, alpha=self.num_columns)
        self.positions_SW.view(-1).index_copy_(0, cells_N, positions_N)

    def note_cells(self, cells_N: Tensor, positions_N: Tensor) -> None:
        """The same in a pooled cache."""
        self._positions_C.index_copy_(0, cells_N, positions_N)

    def positions_of(self, cells_N: Tensor) -> Tensor:
        """The positions of cells of a pooled cache, [N]."""
        return self._positions_C.index_select(0, cells_N)

    def add_layer(self, width: int) -> None:
        """Give an empty cache one more layer, which holds `width` numbers a column."""
        held = self.layers_2SKWd[0]
        empty = held.new_zeros(2, 0, held.shape[2], 0, -(-width // (2 * held.shape[2])))
        self.layers_2SKWd.append(empty)
        if self.is_pooled:
            self.pools_2CKd.append(empty.transpose(2, 3).flatten(1, 2))

    def any_places(self, slots_N: Tensor, columns_N: Tensor) -> Tensor:
        """Where `write` puts rows, in a pooled cache or another one."""
        return self.cells(slots_N, columns_N)[1] if self.is_pooled else self.places(slots_N, columns_N)

    def write_rows(self, layer: int, slots_N: Tensor, columns_N: Tensor, rows_ND: Tensor) -> None:
        """Store rows of a layer that was added."""
        _, _, num_heads, _, width = self.layers_2SKWd[layer].shape
        full_NF = functional.pad(rows_ND, (0, 2 * num_heads * width - rows_ND.shape[1]))
        self.write(layer, self.any_places(slots_N, columns_N), full_NF.view(-1, 2 * num_heads, width))

    def read_rows(self, layer: int, slots_N: Tensor, columns_N: Tensor, width: int) -> Tensor:
        """Rows of a layer that was added, [N, width]."""
        places = self.any_places(slots_N, columns_N)
        if self.is_pooled:
            rows_NF = self.pools_2CKd[layer].index_select(1, places).transpose(0, 1).flatten(1)
        else:
            held = self.layers_2SKWd[layer]
            rows_NF = held.view(-1, held.shape[4]).index_select(0, places).view(len(slots_N), -1)
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


class OnSlots(Model):
    """A model with a slot `cache`, whose columns are a multiple of what its `rules` say."""

    cache: SlotCache
    rules: ShapeRules
    _attend: Attend | None
    has_sums = True

    @property
    def reads_rows(self) -> bool:
        """See Model."""
        return self._attend is not None

    @property
    def cell_bytes(self) -> int:
        """See Model."""
        return self.cache.cell_bytes

    @property
    def column_multiple(self) -> int:
        """See Model."""
        return self.rules.column_multiple

    def allocate(self, num_slots: int, num_columns: int) -> None:
        """See Model."""
        self.resize(max(num_slots, self.cache.num_slots), max(num_columns, self.cache.num_columns))

    def resize(self, num_slots: int, num_columns: int) -> None:
        """See Model."""
        self.cache.resize(num_slots, rounded(num_columns, self.column_multiple))

    def reserve(self, num_cells: int) -> None:
        """See Model."""
        self.cache.reserve(num_cells)

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """See Model."""
        return self.cache.stays(num_slots, rounded(num_columns, self.column_multiple))

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """See Model."""
        self.cache.copy_prefix(source, target, num_columns)

    def copy_columns(self, slots_R: Tensor, from_R: Tensor, to_R: Tensor) -> None:
        """See Model."""
        self.cache.copy_columns(slots_R, from_R, to_R)

    def clear_slot(self, slot: int) -> None:
        """See Model."""
        self.cache.clear_slot(slot)


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
    """The next multiple."""
    return -(-number // multiple) * multiple
