"""Attention of flat token rows over the slot cache; transformers' modules call it instead of their own.

A forward's rows run through a model as one flat sequence, so that products compute no padding. Without kernels only this
module accesses the cache: it writes the rows' keys and values and attends to the visible columns, tile by tile: the rows of one
slot, or those of several, spread over a rectangle. On a GPU a kernel reads the cache by the rows' intervals instead. The `Layout`
or `FlatLayout` that it needs is passed through the model's keyword arguments as one object; nothing is kept between forwards.
Under grouped-query attention the queries of a group become further query rows of their key head: keys and values are never
repeated.

Legend: N flat rows (padding after the valid ones), K key heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.cache import SlotCache
from draftmill.decoders.backbones.invariance import EXACT_DTYPES, ShapeRules, weigh_values
from draftmill.decoders.backbones.packed import can_pack
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.kernels.find import Attend
from draftmill.decoders.kernels.seen import Seen

# Scores that are computed at once: on a CPU few enough for its cache; on a GPU small compared with the weights.
_CPU_SCORES: Final = 1 << 20
_GPU_SCORES: Final = 1 << 28
# Rows of one slot that attend together. The first ones of a prompt see fewer columns than the last ones.
_MOST_LINES: Final = 64
# Numbers of keys and values that are copied out of the cache at once.
_MOST_COPIED: Final = 1 << 22
# The costs of attention, in lines: reading the keys and values of a slot, copying them; and a call, in numbers of keys.
_READ: Final = 3
_COPY: Final = 8
_CALL: Final = 1 << 17
# Fewer query rows of a key head, and numbers of keys, than these leave half precision to torch's fused attention.
_MANY_ROWS: Final = 32
_MANY_KEYS: Final = 3 << 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of a forward that attend together: those of some slots that follow each other, with `num_lines` rows each and their
    first columns.

    `place_N` are the rows' places in the rectangle [slots, lines], None where they fill it. `order_BW` are the columns of each
    slot that stand for the tile's columns; None: the same ones, in their order. `sights` are additive biases [B, T, W] by window.
    """

    rows: slice
    slots: slice | Tensor
    num_slots: int
    num_lines: int
    place_N: Tensor | None
    order_BW: Tensor | None
    sights: Mapping[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the `count` flat rows of one forward sit in the cache, their tiles, and each layer's window, None for all."""

    cache: SlotCache
    count: int
    rules: ShapeRules
    places: Tensor
    windows: tuple[int | None, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where the `count` rows of one forward sit in the cache and what they see, for attention that needs no tiles."""

    cache: SlotCache
    count: int
    places: Tensor
    windows: tuple[int | None, ...]
    seen: Seen
    attend: Attend


AnyLayout = Layout | FlatLayout


class Cut(NamedTuple):
    """The part of a forward's rows that becomes a tile: `num_rows` rows from `first_row` on, of `num_slots` of its slots from
    `first_slot` on. Each has at most `num_lines` rows, which see no column at or beyond `num_columns`. The slots are copied out
    of the cache, unless they follow each other there."""

    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int
    num_lines: int
    num_columns: int
    is_copied: bool


def cut_rows(
    rows: TokenRows, num_columns: int, cache: SlotCache, num_heads: int, multiple: int, *, ordered: bool
) -> list[Cut]:
    """Cut the rows of a forward into tiles. A slot with many rows is cut into parts, since its first rows see fewer columns.
    Slots that are alike go together, since each call costs something. The result's bits don't depend on it.

    `num_heads` are those of queries, `multiple` is that of columns, and slots that are `ordered` are always copied. There is one
    tile on a GPU, where reading the sizes would wait for the device, and in a compiled graph.
    """
    shape = rows.shape
    is_small = shape.num_slots == 1 and shape.num_lines <= _MOST_LINES
    if is_small or rows.slots_G.device.type != "cpu" or torch.compiler.is_compiling():
        copied = ordered or shape.slots is None
        return [Cut(0, rows.num_rows, 0, shape.num_slots, shape.num_lines, num_columns, copied)]
    _, _, key_heads, _, width = cache.layers_2SKWd[0].shape
    end_N = rows.high_IN.where(rows.low_IN < rows.high_IN, 0).amax(0).tolist()
    slots, counts = rows.slots_G.tolist(), rows.owner_N.bincount(minlength=shape.num_slots).tolist()
    # The rows of an ordered slot see the same columns, which each of its tiles would copy.
    most_lines = max(_MOST_LINES, _CPU_SCORES // (num_heads * num_columns)) if ordered else _MOST_LINES

    def cost(cut: Cut) -> int:
        lines = cut.num_lines + _READ + (_COPY if cut.is_copied else 0)
        return _CALL // (key_heads * width) + cut.num_slots * lines * cut.num_columns

    def joined(cut: Cut, other: Cut) -> Cut | None:
        """Both as one tile, where that costs less and is not too large."""
        follows = slots[other.first_slot] == slots[other.first_slot - 1] + 1
        lines, columns = max(cut.num_lines, other.num_lines), max(cut.num_columns, other.num_columns)
        sizes = cut.num_rows + other.num_rows, cut.first_slot, cut.num_slots + 1, lines, columns
        both = Cut(cut.first_row, *sizes, cut.is_copied or other.is_copied or not follows)
        cells = both.num_slots * both.num_columns
        fits = cells * num_heads * both.num_lines <= _CPU_SCORES
        fits &= not both.is_copied or cells * 2 * key_heads * width <= _MOST_COPIED
        return both if fits and cost(both) <= cost(cut) + cost(other) else None

    cuts, first, can_join = list[Cut](), 0, False
    for slot, count in enumerate(counts):
        parts = -(-count // most_lines)
        for part in range(parts):
            start, end = first + count * part // parts, first + count * (part + 1) // parts
            seen = min(num_columns, max(1, -(-max(end_N[start:end]) // multiple)) * multiple)
            cut = Cut(start, end - start, slot, 1, end - start, seen, ordered)
            if parts == 1 and can_join and (both := joined(cuts[-1], cut)) is not None:
                cuts[-1] = both
            else:
                cuts.append(cut)
        first, can_join = first + count, parts == 1
    return cuts


def tile_of(cut: Cut, rows: TokenRows, order_BW: Tensor | None, biases: Mapping[int | None, Tensor]) -> Tile:
    """The tile of a part of the rows; `biases` are those of all rows, [N, W]. Places without a row see everything, since a
    softmax over nothing is NaN."""
    first, num_slots, num_lines = cut.first_slot, cut.num_slots, cut.num_lines
    some, columns = slice(cut.first_row, cut.first_row + cut.num_rows), slice(0, cut.num_columns)
    place_N = None
    if cut.num_rows < num_slots * num_lines:
        place_N = (rows.owner_N[some] - first) * num_lines + rows.line_N[some]
    sights = {}
    for window, bias_NW in biases.items():
        sight = bias_NW[some, columns]
        if place_N is not None:
            sight = sight.new_zeros(num_slots * num_lines, cut.num_columns).index_copy_(0, place_N, sight)
        sights[window] = sight.unflatten(0, (num_slots, num_lines))
    slots: slice | Tensor = rows.slots_G[first : first + num_slots]
    if not cut.is_copied:
        start = rows.shape.slots.start + first if rows.shape.slots is not None else int(rows.slots_G[first])
        slots = slice(start, start + num_slots)
    order = None if order_BW is None else order_BW[first : first + num_slots, columns]
    return Tile(some, slots, num_slots, num_lines, place_N, order, sights)


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of the products of queries and keys: times `scaling`; then cap * tanh(score / cap), if there is a cap; and, if
    a head has a sink, one more place with this score, which is seen by every row and holds nothing (`sink_H`)."""

    scaling: float
    cap: float | None = None
    sink_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether they are scaled only."""
        return self.cap is None and self.sink_H is None

    def capped_(self, scores: Tensor) -> Tensor:
        """The scaled scores, in place."""
        return scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)

    def left(self, scores_CRW: Tensor, weight_CRW: Tensor, by_row: tuple[int, ...]) -> Tensor | None:
        """The share of each row's weight that its sink leaves, [B, K, T, G, 1]; None without sinks. Weights of a row sum up to
        one, and the largest one is exp(0) / sum: so this takes no sum, whose order would depend on the number of columns."""
        if self.sink_H is None:
            return None
        sink_K1G1 = self.sink_H.to(scores_CRW.dtype).view(by_row[1], 1, -1, 1)
        most, largest = (each.view(by_row).amax(-1, keepdim=True) for each in (scores_CRW, weight_CRW))
        return 1 / (1 + (sink_K1G1 - most).exp() * largest)


def slot_attention(
    module: Any,
    query_1HNd: Tensor,
    key_1KNd: Tensor,
    value_1KNd: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    layout: AnyLayout,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; returns ([1, N, H, d], no attention weights). All layers of a cache
    have its number of key heads and its width: a layer with fewer heads writes each of them more than once, a narrower one
    zeros."""
    held: Any = layout.cache.layers_2SKWd[0]
    key_heads, width, value_width = held.shape[2], held.shape[4], value_1KNd.shape[3]
    if key_1KNd.shape[1] != key_heads or not key_1KNd.shape[3] == value_width == width:
        times = key_heads // key_1KNd.shape[1]
        query_1HNd = functional.pad(query_1HNd, (0, width - query_1HNd.shape[3]))
        key_1KNd, value_1KNd = (
            functional.pad(rows, (0, width - rows.shape[3])).repeat_interleave(times, 1)
            for rows in (key_1KNd, value_1KNd)
        )
    query_NHd, key_NKd, value_NKd = (rows[0].transpose(0, 1) for rows in (query_1HNd, key_1KNd, value_1KNd))
    held_NXd = torch.cat([key_NKd, value_NKd], 1)
    scores = Scores(scaling, softcap, s_aux)
    mixed = attend_rows(int(module.layer_idx), query_NHd, held_NXd, scores=scores, layout=layout)
    return mixed[..., :value_width].unsqueeze(0), None


def attend_rows(layer: int, query_PHd: Tensor, held_PXd: Tensor | None, *, scores: Scores, layout: AnyLayout) -> Tensor:
    """Write the valid rows' keys and, beside them, values (X = 2 K), if given, and attend, [P, H, d]; padding rows get 0."""
    count = layout.count
    if held_PXd is not None:
        layout.cache.write(layer, layout.places, held_PXd[:count])
    window = layout.windows[layer]
    if isinstance(layout, FlatLayout):
        held_2SKWd = layout.cache.layers_2SKWd[layer]
        more = {} if scores.is_plain else {"cap": scores.cap, "sink_H": scores.sink_H}
        asked = query_PHd[:count], held_2SKWd, layout.seen
        mixed_NHd = layout.attend(*asked, scaling=scores.scaling, window=window, **more)
    else:
        parts = [_attend_tile(query_PHd[tile.rows], layer, layout, tile, scores) for tile in layout.tiles]
        mixed_NHd = parts[0] if len(parts) == 1 else torch.cat(parts)
    padding = query_PHd.shape[0] - count
    return functional.pad(mixed_NHd, (0, 0, 0, 0, 0, padding)) if padding else mixed_NHd


def _attend_tile(query_NHd: Tensor, layer: int, layout: Layout, tile: Tile, scores: Scores) -> Tensor:
    """Spread the rows of a tile over its rectangle, attend, and gather them; [N, H, d]."""
    bias_BTW = tile.sights[layout.windows[layer]]
    if tile.order_BW is None:
        held = layout.cache.read(layer, tile.slots, bias_BTW.shape[2])
    else:
        assert isinstance(tile.slots, Tensor), "slots whose columns have an order are copied"
        held = layout.cache.read_in_order(layer, tile.slots, tile.order_BW)
    spread = query_NHd
    if tile.place_N is not None:
        spread = query_NHd.new_zeros(tile.num_slots * tile.num_lines, *query_NHd.shape[1:])
        spread[tile.place_N] = query_NHd
    query_BTHd = spread.unflatten(0, (tile.num_slots, tile.num_lines))
    lines = max(1, _GPU_SCORES // (query_NHd.shape[1] * bias_BTW.shape[2]))
    whole = query_BTHd, *held, bias_BTW
    if tile.num_slots * tile.num_lines <= lines:
        mixed = attend_grouped(*whole, scores=scores, rules=layout.rules).flatten(0, 1)
    else:  # on a GPU
        parts = [
            attend_grouped(query, key, value, bias, scores=scores, rules=layout.rules).flatten(0, 1)
            for query_slot, key, value, bias_slot in zip(*(each.split(1) for each in whole), strict=True)
            for query, bias in zip(query_slot.split(lines, 1), bias_slot.split(lines, 1), strict=True)
        ]
        mixed = torch.cat(parts)
    return mixed if tile.place_N is None else mixed[tile.place_N]


def attend_grouped(
    query_BTHd: Tensor, key_BKWd: Tensor, value_BKWd: Tensor, bias_BTW: Tensor, *, scores: Scores, rules: ShapeRules
) -> Tensor:
    """Softmax attention with an additive bias that all heads share; head h of the queries reads key head h // G. [B, T, H, d].
    In float32 and float64 on a CPU the products keep the shape rules (invariance.py), so that a row's bits depend on no
    neighbour. Elsewhere most are left to torch's fused attention. Scores are float32 or better everywhere."""
    num_slots, num_rows, num_heads, width = query_BTHd.shape
    key_heads, num_columns = key_BKWd.shape[1], key_BKWd.shape[2]
    group = num_heads // key_heads
    count, rows = num_slots * key_heads, num_rows * group
    grouped = (num_slots, num_rows, key_heads, group, width)
    by_row = (num_slots, key_heads, num_rows, group, num_columns)
    device, dtype = query_BTHd.device, query_BTHd.dtype
    is_half = dtype not in EXACT_DTYPES
    # oneDNN multiplies bfloat16 much faster than fused attention does, and rounds the products: values may be, scores may not.
    by_onednn = is_half and (rows >= _MANY_ROWS or key_BKWd.numel() >= _MANY_KEYS) and can_pack(dtype, device)
    if by_onednn or not scores.is_plain or (device.type == "cpu" and not is_half):
        wide = torch.promote_types(dtype, torch.float32)
        query_CRd = (query_BTHd.to(wide) * scores.scaling).reshape(grouped).transpose(1, 2).reshape(count, rows, width)
        if not is_half and rows < rules.min_queries:  # more rows, which see everything and are cut off
            query_CRd = functional.pad(query_CRd, (0, 0, 0, rules.min_queries - rows))
        score_CRW = scores.capped_(torch.bmm(query_CRd, key_BKWd.to(wide).flatten(0, 1).transpose(1, 2)))
        if num_rows == 1:
            score_CRW.view(num_slots, -1, num_columns).add_(bias_BTW)
        else:
            score_CRW[:, :rows].view(by_row).add_(bias_BTW[:, None, :, None])
        weight_CRW = score_CRW.softmax(-1)
        number, most_columns = (dtype, num_columns) if by_onednn else (wide, rules.sum_columns)
        mixed_CRd = weigh_values(weight_CRW.to(number), value_BKWd.to(number).flatten(0, 1), most_columns)[:, :rows]
        if (left := scores.left(score_CRW[:, :rows], weight_CRW[:, :rows], by_row)) is not None:
            mixed_CRd = mixed_CRd * left.reshape(count, rows, 1)
        mixed = mixed_CRd.to(dtype)
        if num_rows == 1:
            return mixed.reshape(query_BTHd.shape)
    else:
        query_BKRd = query_BTHd.reshape(grouped).transpose(1, 2).reshape(num_slots, key_heads, rows, width)
        bias = bias_BTW.unsqueeze(2).expand(-1, -1, group, -1).reshape(num_slots, 1, rows, num_columns)
        mixed = functional.scaled_dot_product_attention(
            query_BKRd, key_BKWd, value_BKWd, attn_mask=bias, scale=scores.scaling
        )
    mixed_BTKGd = mixed.reshape(num_slots, key_heads, num_rows, group, width).transpose(1, 2)
    return mixed_BTKGd.reshape(num_slots, num_rows, num_heads, width)
