"""Attention of flat token rows over the slot cache; transformers' modules call it instead of their own.

A forward's rows run through a model as one flat sequence, so that products compute no padding. Without kernels only this
module accesses the cache: it writes the rows' keys and values, spreads the queries over a rectangle with one line per slot,
attends to the visible columns, and gathers the results. On a GPU a kernel reads the cache by the rows' intervals instead. The
`Layout` or `FlatLayout` that it needs is passed through the model's keyword arguments as one object; nothing is kept between
forwards. Under grouped-query attention the queries of a group become further query rows of their key head: keys and values are
never repeated.

Legend: N flat rows (padding after the valid ones), K key heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.cache import SlotCache
from draftmill.decoders.backbones.invariance import EXACT_DTYPES, ShapeRules, weigh_values
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.kernels.find import Attend
from draftmill.decoders.kernels.seen import Seen

# Scores computed at once: on a CPU few enough for its cache; on a GPU small compared with the weights. Never fewer rows than
# this, so that parts stay above what the shape rules ask for.
_CPU_SCORES: Final = 1 << 20
_GPU_SCORES: Final = 1 << 28
_LEAST_ROWS: Final = 64
# Keys that are copied out in the order of positions at once.
_MOST_COPIED: Final = 1 << 21
# The cost of copying a slot's keys and values, in lines of attention; the share of a rectangle below which it is cut.
_COPY: Final = 8
_WORTH_CUTTING: Final = 0.75


Band = tuple[Tensor | None, slice, slice]
"""Some slots (None: all of them), some of their lines, and the columns that these see."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the `count` flat rows of one forward sit in the cache and in the [num_slots, num_rows] rectangle, and what they see.

    `order_BW` are the columns of each slot that the rectangle's columns stand for; None: the same ones, in their order.
    `rectangle_N` is None where the rows fill the rectangle in order. `bands` are the parts of the rectangle that hold rows
    (`cut_ragged`). `sights` are additive biases over the rectangle by window; `windows` gives the window of each layer, None for
    one that sees everything.
    """

    cache: SlotCache
    slots: Tensor | slice
    order_BW: Tensor | None
    count: int
    num_slots: int
    num_rows: int
    rules: ShapeRules
    places: Tensor
    rectangle_N: Tensor | None
    bands: tuple[Band, ...]
    windows: tuple[int | None, ...]
    sights: Mapping[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where the `count` rows of one forward sit in the cache and what they see, for attention that needs no rectangle."""

    cache: SlotCache
    count: int
    places: Tensor
    windows: tuple[int | None, ...]
    seen: Seen
    attend: Attend


AnyLayout = Layout | FlatLayout


def cut_ragged(rows: TokenRows, num_columns: int, multiple: int) -> tuple[Band, ...]:
    """Cut a rectangle of lines and columns into a part that nearly all slots fill, and parts for the few larger slots.

    If one slot has many rows or sees many columns, every other slot would be padded to the same size. The few large slots are
    copied out of the cache, so this is done only if it saves a large share: either the lines beyond a cut for the slots with
    more lines, or the whole work of the slots that see more columns than a cut (a multiple of `multiple`). The result's bits
    don't depend on it. The rectangle stays whole on a GPU, where reading the sizes would wait for the device, and in a compiled
    graph.
    """
    num_slots, num_lines = rows.shape.num_slots, rows.shape.num_lines
    every_line, every_column = slice(0, num_lines), slice(0, num_columns)
    if rows.slots_G.device.type != "cpu" or num_slots == 1 or torch.compiler.is_compiling():
        return ((None, every_line, every_column),)
    lines_B, columns_B = _extents(rows, num_columns, multiple)
    slots = list(zip(lines_B.tolist(), columns_B.tolist(), strict=True))
    most = _WORTH_CUTTING * num_slots * num_lines * num_columns
    if sum(lines * columns for lines, columns in slots) > most:  # no cut costs less than this
        return ((None, every_line, every_column),)

    def cost_of_lines(cut: int) -> int:
        more = sum(lines > cut for lines, _ in slots)
        return (num_slots * cut + (num_lines - cut + _COPY) * more) * num_columns

    def near_lines(cut: int) -> int:
        return max((lines for lines, columns in slots if columns <= cut), default=0)

    def cost_of_columns(cut: int) -> int:
        more = sum(columns > cut for _, columns in slots)
        return num_slots * near_lines(cut) * cut + (num_lines + _COPY) * more * num_columns

    lines = min((cost_of_lines(cut), cut) for cut in {lines for lines, _ in slots})
    columns = min((cost_of_columns(cut), cut) for cut in {columns for _, columns in slots})
    if min(lines, columns)[0] > most:
        return ((None, every_line, every_column),)
    if lines <= columns:
        more_B = (lines_B > lines[1]).nonzero().squeeze(1)
        return ((None, slice(0, lines[1]), every_column), (more_B, slice(lines[1], num_lines), every_column))
    more_B = (columns_B > columns[1]).nonzero().squeeze(1)
    return ((None, slice(0, near_lines(columns[1])), slice(0, columns[1])), (more_B, every_line, every_column))


def _extents(rows: TokenRows, num_columns: int, multiple: int) -> tuple[Tensor, Tensor]:
    """How many lines each slot has, and how many columns its rows see at most, rounded up; int64 [B] each."""
    lines_B = rows.owner_N.bincount(minlength=rows.shape.num_slots)
    end_N = rows.high_IN.where(rows.low_IN < rows.high_IN, 0).amax(0)
    columns_B = torch.zeros_like(lines_B).scatter_reduce_(0, rows.owner_N, end_N, "amax")
    return lines_B, (-(-columns_B // multiple) * multiple).clamp(max=num_columns)


def bias_of(seen_NW: Tensor, shape: tuple[int, int], rectangle_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What rows see, as an additive bias (0 or -inf) over the rectangle of this shape, [*shape, W]. Places without a row see
    everything, since a softmax over nothing is NaN."""
    bias_NW = torch.where(seen_NW, 0.0, -torch.inf).to(dtype)
    if rectangle_N is None:
        return bias_NW.view(*shape, -1)
    bias_PW = bias_NW.new_zeros(shape[0] * shape[1], bias_NW.shape[1])
    bias_PW[rectangle_N] = bias_NW
    return bias_PW.view(*shape, -1)


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

    def left(self, scores_BKTGW: Tensor, weight_BKTGW: Tensor) -> Tensor | None:
        """The share of each row's weight that its sink leaves; None without sinks. Weights of a row sum up to one, and the
        largest one is exp(0) / sum: so this takes no sum, whose order would depend on the number of columns."""
        if self.sink_H is None:
            return None
        sink_K1G1 = self.sink_H.to(scores_BKTGW.dtype).view(scores_BKTGW.shape[1], 1, -1, 1)
        most, largest = scores_BKTGW.amax(-1, keepdim=True), weight_BKTGW.amax(-1, keepdim=True)
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


def attend_rows(layer: int, query_PHd: Tensor, held_PXd: Tensor, *, scores: Scores, layout: AnyLayout) -> Tensor:
    """Write the valid rows' keys and, beside them, values (X = 2 K), and attend; what padding rows get is 0. [P, H, d]."""
    count = layout.count
    layout.cache.write(layer, layout.places, held_PXd[:count])
    window = layout.windows[layer]
    if isinstance(layout, FlatLayout):
        held_2SKWd = layout.cache.layers_2SKWd[layer]
        more = {} if scores.is_plain else {"cap": scores.cap, "sink_H": scores.sink_H}
        asked = query_PHd[:count], held_2SKWd, layout.seen
        mixed_NHd = layout.attend(*asked, scaling=scores.scaling, window=window, **more)
    else:
        mixed_NHd = _mix(query_PHd[:count], layer, layout, layout.sights[window], scores)
    padding = query_PHd.shape[0] - count
    return functional.pad(mixed_NHd, (0, 0, 0, 0, 0, padding)) if padding else mixed_NHd


def _mix(query_NHd: Tensor, layer: int, layout: Layout, bias_BTW: Tensor, scores: Scores) -> Tensor:
    """Spread the valid rows over the rectangle, attend part by part, gather them; [valid N, H, d]."""
    held: Held | Scattered
    if layout.order_BW is None:
        held = Held(*layout.cache.read(layer, layout.slots, bias_BTW.shape[2]))
    else:
        assert isinstance(layout.slots, Tensor), "each slot is named with its columns"
        held = Scattered(layout.cache, layer, layout.slots, layout.order_BW)
    attend = partial(attend_grouped, scores=scores, rules=layout.rules)
    spread = query_NHd
    if layout.rectangle_N is not None:
        spread = query_NHd.new_zeros(layout.num_slots * layout.num_rows, *query_NHd.shape[1:])
        spread[layout.rectangle_N] = query_NHd
    query_BTHd = spread.reshape(layout.num_slots, layout.num_rows, *query_NHd.shape[1:])
    if len(layout.bands) == 1:
        mixed = _in_parts(attend, query_BTHd, held, bias_BTW)
    else:
        # Cells outside of the bands stay as they are, since no row is gathered from there. A later band overwrites an earlier
        # one.
        mixed = torch.empty_like(query_BTHd)
        for slots, lines, columns in layout.bands:
            some: slice | Tensor = slice(None) if slots is None else slots
            near_bias = bias_BTW[some, lines, columns]
            mixed[some, lines] = _in_parts(attend, query_BTHd[some, lines], held.part(some, columns), near_bias)
    mixed = mixed.flatten(0, 1)
    return mixed if layout.rectangle_N is None else mixed[layout.rectangle_N]


@dataclass(frozen=True, slots=True)
class Held:
    """Keys and values of some slots and columns, [B, K, W, d] each: views of the cache where its slots follow each other."""

    key: Tensor
    value: Tensor

    @property
    def most_slots(self) -> int | None:
        """Of how many slots they are read at once; None: of any number."""
        return None

    def part(self, some: slice | Tensor, columns: slice) -> Held:
        """Those of some of the slots and of the columns."""
        return Held(self.key[some, :, columns], self.value[some, :, columns])

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and the values."""
        return self.key, self.value


@dataclass(frozen=True, slots=True)
class Scattered:
    """Keys and values of some slots, each with columns of its own, which are copied when they are read."""

    cache: SlotCache
    layer: int
    slots_B: Tensor
    order_BW: Tensor

    @property
    def most_slots(self) -> int | None:
        """See Held."""
        _, _, num_heads, _, width = self.cache.layers_2SKWd[self.layer].shape
        return max(1, _MOST_COPIED // (num_heads * width * self.order_BW.shape[1]))

    def part(self, some: slice | Tensor, columns: slice) -> Scattered:
        """See Held."""
        return Scattered(self.cache, self.layer, self.slots_B[some], self.order_BW[some, columns])

    def read(self) -> tuple[Tensor, Tensor]:
        """See Held."""
        return self.cache.read_in_order(self.layer, self.slots_B, self.order_BW)


def _in_parts(attend: Callable[..., Tensor], query_BTHd: Tensor, held: Held | Scattered, bias_BTW: Tensor) -> Tensor:
    """Attend in parts of slots and lines whose scores, and keys that must be copied, stay small."""
    num_slots, num_rows, num_heads, _ = query_BTHd.shape
    limit = _CPU_SCORES if query_BTHd.device.type == "cpu" else _GPU_SCORES
    most_slots = held.most_slots or num_slots
    if num_slots * num_rows * num_heads * bias_BTW.shape[2] <= limit and num_slots <= most_slots:
        return attend(query_BTHd, *held.read(), bias_BTW)
    mixed = torch.empty_like(query_BTHd)
    for some, lines in _parts(query_BTHd, bias_BTW.shape[2], limit, most_slots):
        near = held.part(some, slice(None)).read()
        mixed[some, lines] = attend(query_BTHd[some, lines], *near, bias_BTW[some, lines])
    return mixed


def _parts(query_BTHd: Tensor, num_columns: int, limit: int, most_slots: int) -> list[tuple[slice, slice]]:
    """Cut a rectangle into parts (slots, lines) whose scores fit into memory at once, of at most `most_slots` slots."""
    num_slots, num_rows, num_heads, _ = query_BTHd.shape
    rows_at_once = max(_LEAST_ROWS, limit // (num_heads * num_columns))
    if rows_at_once >= num_rows:
        step = min(rows_at_once // num_rows, most_slots)
        return [(slice(first, first + step), slice(None)) for first in range(0, num_slots, step)]
    count = -(-num_rows // rows_at_once)
    lines = [slice(num_rows * part // count, num_rows * (part + 1) // count) for part in range(count)]
    return [(slice(slot, slot + 1), line) for slot in range(num_slots) for line in lines]


def attend_grouped(
    query_BTHd: Tensor, key_BKWd: Tensor, value_BKWd: Tensor, bias_BTW: Tensor, *, scores: Scores, rules: ShapeRules
) -> Tensor:
    """Softmax attention with an additive bias that all heads share; head h of the queries reads key head h // G. [B, T, H, d].
    In float32 and float64 on a CPU the products keep the shape rules (invariance.py), so that a row's bits depend on no
    neighbour; elsewhere they are left to torch's fused attention, which keeps scores in float32 or better."""
    num_slots, num_rows, num_heads, width = query_BTHd.shape
    key_heads, num_columns = key_BKWd.shape[1], key_BKWd.shape[2]
    group = num_heads // key_heads
    count, rows = num_slots * key_heads, num_rows * group
    grouped = (num_slots, num_rows, key_heads, group, width)
    is_exact = query_BTHd.device.type == "cpu" and query_BTHd.dtype in EXACT_DTYPES
    if is_exact or not scores.is_plain:
        wide = torch.promote_types(query_BTHd.dtype, torch.float32)
        query_CRd = (query_BTHd.to(wide) * scores.scaling).reshape(grouped).transpose(1, 2).reshape(count, rows, width)
        # Rows that are too few are repeated, and what the others give is cut off.
        times = -(-rules.min_queries // rows)
        if times > 1:
            query_CRd = query_CRd.unsqueeze(1).expand(-1, times, -1, -1).contiguous().flatten(1, 2)
        score_CRW = scores.capped_(torch.bmm(query_CRd, key_BKWd.to(wide).flatten(0, 1).transpose(1, 2)))
        if num_rows == 1:
            score_CRW.view(num_slots, key_heads * times * rows, num_columns).add_(bias_BTW)
        else:
            all_rows = (num_slots, key_heads, times, num_rows, group, num_columns)
            score_CRW.view(all_rows).add_(bias_BTW[:, None, None, :, None])
        weight_CRW, by_head = score_CRW.softmax(-1), (num_slots, key_heads, times * num_rows, group, num_columns)
        left = scores.left(score_CRW.view(by_head), weight_CRW.view(by_head))
        mixed_CRd = weigh_values(weight_CRW, value_BKWd.to(wide).flatten(0, 1), rules.sum_columns)
        if left is not None:
            mixed_CRd = mixed_CRd * left.reshape(count, times * rows, 1)
        mixed = mixed_CRd[:, :rows].to(query_BTHd.dtype)
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
