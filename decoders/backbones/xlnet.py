"""XLNet's two-stream attention over a slot cache, for inference.

The content state of a decided token depends only on tokens decided before it, so its keys and values are computed once and
cached; a forward then runs just the new content rows and the query rows. Both streams share every weight: rows of either
kind go through the same matrix products and differ only in where they start (word embedding or mask embedding), in what they
see, and in whether they write keys and values.

Source: Yang et al., "XLNet" (2019), equations for the two streams and the relative positional attention; the layout of the
checkpoint is transformers' XLNetLMHeadModel. A row that sees nothing (first query of an empty prompt) has attention output
zero: a softmax over nothing would read tokens that are not decided yet.

An any-subset model decodes the positions of a canvas in an *order*; the *rank* of a position is its
place in it. In a slot the columns of the cache are ranks, so a rule needs one number a row, its *limit*: the row sees the columns
< limit.

    columns (ranks)      0 1 2 | 3 4 5 6          m = 3 prompt tokens, n = 4 decided, drafts at ranks 4 and 5
    prompt content 0..2  x x x | . . . .          limit m: the prompt sees all of itself
    content of rank 4    x x x | x x . .          limit rank + 1: itself and what came before
    query, draft pass    x x x | x . . .          limit n, whatever its rank
    query, density pass  x x x | x x . .          limit = its own rank (here 5)
    query, stale (s=0)   x x x | x . . .          limit n + s for a rank beyond n + s

On a GPU a kernel attends to the cache by the rows' limits (decoders/kernels/attention.py): the scores of all distances come from
one product, and the kernel adds to each column's score the one of its distance. No rectangle, mask or bias over columns is made.

Legend: N token rows (content first, then queries), P distances.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones import invariance
from draftmill.decoders.backbones.base import Model, Running
from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.backbones.families.xlnet import XLNetShape
from draftmill.decoders.backbones.invariance import NO_RULES, NUM_PROBE_ROWS, Attention, Product, ShapeRules
from draftmill.decoders.backbones.network import ACTIVATE
from draftmill.decoders.backbones.rows import StreamRows
from draftmill.decoders.kernels.find import Attend, find_attention, find_fixed_product
from draftmill.decoders.kernels.seen import Seen, Tiling

# Scores of relative positions held at once, in numbers; a longer prefill is done a few slots at a time.
_MAX_BIAS_NUMBERS: Final = 1 << 24
_MAX_RELATIVE_NUMBERS: Final = 1 << 27
# Keys of distances are computed in chunks of this size: their bits then don't depend on the size of the table.
_DISTANCES: Final = 32


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the flat rows of one forward (content first) sit in a padded [B, T] rectangle, and what they see. `rows_BT` and, of
    query rows alone, `last_rows_BT` are the rows at the rectangle's places; places without one repeat the first. `blind_N` says
    which rows see nothing; None if all see something."""

    num_content: int
    span: int
    rectangle_N: Tensor
    rows_BT: Tensor
    last_rows_BT: Tensor
    places: Tensor
    slots: Tensor | slice
    hidden_N1W: Tensor
    distance_N1W: Tensor
    blind_N: Tensor | None


@dataclass(frozen=True, slots=True)
class _FlatLayout:
    """The same where a kernel attends: what all rows see, and the query rows alone (`last`), which are all that the last layer
    runs. `at_once` heads are scored together."""

    num_content: int
    span: int
    places: Tensor
    seen: Seen
    last: Seen
    at_once: int


_AnyLayout = _Layout | _FlatLayout


@functools.lru_cache(maxsize=8)
@torch.no_grad()
def xlnet_rules(widths: tuple[int, int, int, int], num_heads: int, dtype: torch.dtype, threads: int) -> ShapeRules:
    """The shape rules of a model of these `widths`: its own, that of all heads together, of the inner layer, of the vocabulary.
    `threads` moves the boundaries between the libraries' kernels."""
    width, heads_width, inner, vocab_size = widths
    shapes = {(width, heads_width), (heads_width, width), (width, inner), (inner, width), (width, vocab_size)}
    products: list[Product] = [
        (
            functools.partial(functional.linear, weight=invariance.normal(1, num_out, num_in).to(dtype)),
            num_in,
            num_out,
            dtype,
        )
        for num_in, num_out in shapes
    ]
    return invariance.find_rules(
        products, _relative_attention(num_heads, heads_width // num_heads, dtype), dtype, longest=None
    )


def _relative_attention(num_heads: int, width: int, dtype: torch.dtype) -> Attention:
    """Attention whose bias comes from the relative positions, as in a layer; columns are positions."""
    key, value, distances = (
        invariance.probe_columns(seed, None, heads=num_heads, width=width).to(dtype) for seed in (1, 2, 3)
    )
    query = invariance.normal(4, 2, key.shape[1], NUM_PROBE_ROWS, width).to(dtype) * width**-0.5
    distances_Hdp = distances[0].transpose(1, 2).contiguous()

    def attention(slots: int, rows: slice, visible: int, columns: int, rules: ShapeRules) -> Tensor:
        part = query[:slots, :, rows]
        flat_NHd = part.transpose(1, 2).flatten(0, 1)
        scores_NHp = invariance.position_scores(flat_NHd, distances_Hdp[:, :, :columns], rules.min_rows)
        bias = scores_NHp.unflatten(0, (slots, -1)).transpose(1, 2).clone()
        bias[..., visible:] = -torch.inf
        near = (slice(0, slots), slice(None), slice(0, columns))
        return invariance.attend(part, key[near], value[near], bias, rules.sum_columns).transpose(1, 2)

    return attention


class XLNetBackbone(Model):
    """See the module's docstring; `weights` are the checkpoint's tensors by name, already checked for completeness."""

    def __init__(self, shape: XLNetShape, weights: Mapping[str, Tensor], how: Running) -> None:
        self.device, self.dtype, dtype, is_fixed = how.device, how.dtype, how.dtype, how.is_fixed
        self.vocab_size, self.width = shape.vocab_size, shape.d_model
        self.num_heads, self.head_width = shape.n_head, shape.d_head
        self.num_layers, self.clamp_len, self.eps = shape.n_layer, shape.clamp_len, shape.layer_norm_eps
        self.activation, self.num_rows_computed = ACTIVATE[shape.ff_activation], 0
        ready = {name: tensor.to(device=self.device, dtype=dtype) for name, tensor in weights.items()}
        self.embedding_VD = ready["transformer.word_embedding.weight"]
        self.mask_embedding_D = ready["transformer.mask_emb"].reshape(self.width)
        self.output_VD = ready.get("lm_loss.weight", self.embedding_VD)
        self.output_bias_V = ready["lm_loss.bias"]
        self.layers = [self._layer(ready, f"transformer.layer.{index}.") for index in range(self.num_layers)]
        self.rules = replace(NO_RULES, exact=how.exact)
        heads_width = self.num_heads * self.head_width
        if self.device.type == "cpu":
            widths = (self.width, heads_width, shape.d_inner, self.vocab_size)
            self.rules = xlnet_rules(widths, self.num_heads, dtype, torch.get_num_threads())
        self.min_rows, self.exact = self.rules.min_rows, self.rules.exact
        self._inner = shape.d_inner
        self.num_weights = self.num_layers * self.width * (4 * heads_width + 2 * shape.d_inner)
        heads = {"num_heads": self.num_heads, "key_heads": self.num_heads, "width": self.head_width}
        self._attend = find_attention(self.device, dtype, **heads, relative=True, fixed=is_fixed)
        self._product = find_fixed_product(self.device, dtype) if is_fixed else None
        self.tiling = Tiling.of(self.device, dtype, group=1, width=self.head_width, relative=True, fixed=is_fixed)
        self.captures = self._attend is not None
        self.relative: list[Tensor] = []
        self.cache_shape = self.num_layers, self.num_heads, self.head_width
        self.forget()

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> Any:
        attention, inner = prefix + "rel_attn.", prefix + "ff."
        inner_width = self.num_heads * self.head_width
        into_heads = {name: weights[attention + name].reshape(self.width, inner_width).T for name in ("q", "k", "v")}
        # The scale of the scores is folded into the queries once instead of into every score.
        scale = self.head_width**-0.5

        def pair(name: str) -> tuple[Tensor, Tensor]:
            return weights[name + ".weight"], weights[name + ".bias"]

        return SimpleNamespace(
            query_DD=(into_heads["q"] * scale).contiguous(),
            key_value_DD=torch.cat([into_heads["k"], into_heads["v"]]).contiguous(),
            output_DD=weights[attention + "o"].reshape(self.width, inner_width).contiguous(),
            relative_DHd=weights[attention + "r"],
            content_bias_Hd=weights[attention + "r_w_bias"] * scale,
            position_bias_Hd=weights[attention + "r_r_bias"] * scale,
            attention_norm=(*pair(attention + "layer_norm"), self.eps),
            inner_1=pair(inner + "layer_1"),
            inner_2=pair(inner + "layer_2"),
            inner_norm=(*pair(inner + "layer_norm"), self.eps),
        )

    def stays(self, num_slots: int, num_columns: int) -> bool:
        """See Model. How many distances a forward looks at depends on the number of columns."""
        num_columns = rounded(num_columns, self.column_multiple)
        return num_columns == self.cache.num_columns and super().stays(num_slots, num_columns)

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Resize to exactly this many slots and columns; content within them stays. The table of distances only grows."""
        relative = self._relative_to(num_columns)
        super().resize(num_slots, num_columns)
        self.relative = relative

    def spread(self, num_slots: int, num_columns: int) -> bool:
        before, self.relative = self.cache.num_columns, self._relative_to(num_columns)
        super().spread(num_slots, num_columns)
        return before == self.cache.num_columns

    def _relative_to(self, num_columns: int) -> list[Tensor]:
        """The keys of all distances between this many columns, or more."""
        num_columns = rounded(num_columns, self.column_multiple)
        num_held = self.relative[0].shape[2] // 2 if self.relative else 0
        if num_columns <= num_held:
            return self.relative
        return [self._relative_keys(layer, num_columns) for layer in self.layers]

    @property
    def row_bytes(self) -> int:
        """See Model: states, heads and the inner layer."""
        return (8 * self.width + 2 * self._inner) * self.dtype.itemsize

    def _relative_keys(self, layer: Any, num_positions: int) -> Tensor:
        """Keys of the distances -P .. P - 1, [H, d, 2P]: sinusoids (float64 angles) through the layer's projection."""
        distance = torch.arange(-num_positions, num_positions, dtype=torch.float64)
        if self.clamp_len > 0:
            distance = distance.clamp(-self.clamp_len, self.clamp_len)
        frequency = 10000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angle = distance.unsqueeze(1) * frequency
        sinusoid = torch.cat([angle.sin(), angle.cos()], dim=1).to(device=self.device, dtype=self.dtype)
        parts = [torch.einsum("pD,Dhd->hdp", part, layer.relative_DHd) for part in sinusoid.split(_DISTANCES)]
        return torch.cat(parts, dim=2).contiguous()

    @torch.no_grad()
    def forward(self, rows: StreamRows) -> Tensor:
        """Write the content rows' keys and values and return the query rows' last hidden states, [Q, D]."""
        limit_N = torch.cat([rows.limit_N, rows.limit_Q])
        column_N = torch.cat([rows.column_N, rows.rank_Q])
        slot_N = rows.slots_G[torch.cat([rows.owner_N, rows.owner_Q])]
        make: Callable[..., _AnyLayout] = self._flat_layout if self.reads_rows else self._layout
        layout = make(rows, limit_N, column_N, slot_N)
        num_query = rows.rank_Q.shape[0]
        content_ND = self.embedding_VD[rows.token_N]
        states_ND = torch.cat([content_ND, self.mask_embedding_D.expand(num_query, self.width)])
        self.num_rows_computed = max(states_ND.shape[0], self.rules.min_rows)
        entering_ND = states_ND
        for index, layer in enumerate(self.layers):
            entering_ND = states_ND
            states_ND = self._layer_forward(layer, index, states_ND, layout)
        # The last layer gives no state of a content row; what entered it says whether its keys and values are finite.
        num_content = len(entering_ND) - num_query
        self.sums_N = torch.cat([entering_ND[:num_content], states_ND]).sum(1, dtype=torch.float64)
        return states_ND

    def _layout(self, rows: StreamRows, limit_N: Tensor, column_N: Tensor, slot_N: Tensor) -> _Layout:
        shape, order_SW = rows.shape, self.cache.positions_SW
        num_content, num_query = rows.token_N.shape[0], rows.rank_Q.shape[0]
        num_rows = max(shape.num_lines + shape.num_queries, self.rules.min_queries)
        content_N = torch.add(rows.line_N, rows.owner_N, alpha=num_rows)
        query_N = torch.add(rows.line_Q + shape.num_lines, rows.owner_Q, alpha=num_rows)
        rectangle_N = torch.cat([content_N, query_N])
        row_N = torch.arange(num_content + num_query, device=self.device)
        rows_P, last_rows_P = row_N.new_zeros(2, shape.num_slots * num_rows)
        rows_P[rectangle_N] = row_N
        last_rows_P[query_N] = row_N[:num_query]
        num_columns = self.rules.columns(shape.num_columns, order_SW.shape[1])
        position_N1 = order_SW[slot_N, column_N].unsqueeze(1)
        # Half the number of distances looked at: the longest canvas of the batch.
        span = self.rules.columns(shape.num_positions or 0, order_SW.shape[1])
        distance_NW = (position_N1 - order_SW[slot_N, :num_columns] + span).clamp_(0, 2 * span - 1)
        hidden_NW = torch.arange(num_columns, device=self.device) >= limit_N.clamp(min=1).unsqueeze(1)
        return _Layout(
            num_content=num_content,
            span=span,
            rectangle_N=rectangle_N,
            rows_BT=rows_P.view(-1, num_rows),
            last_rows_BT=last_rows_P.view(-1, num_rows),
            places=self.cache.places(slot_N[:num_content], rows.column_N),
            slots=rows.slots_G if shape.slots is None else shape.slots,
            hidden_N1W=hidden_NW.unsqueeze(1),
            distance_N1W=distance_NW.unsqueeze(1),
            blind_N=limit_N == 0 if shape.some_blind else None,
        )

    def _flat_layout(self, rows: StreamRows, limit_N: Tensor, column_N: Tensor, slot_N: Tensor) -> _FlatLayout:
        shape, num_content, order_SW = rows.shape, rows.token_N.shape[0], self.cache.positions_SW
        start_N = None
        if rows.start_N is not None and rows.start_Q is not None:
            start_N = torch.cat([rows.start_N, rows.start_Q])
        start_N, cells_N = self.cache.cells(slot_N, column_N, start_N)
        position_N, places = order_SW[0].index_select(0, cells_N), cells_N[:num_content]
        sight = slot_N, torch.zeros_like(limit_N).unsqueeze(0), limit_N.unsqueeze(0), position_N
        tables = rows.tables or self.tiling.tables(torch.cat([rows.line_N, rows.line_Q]))
        seen = Seen(*sight, order_SW, tables, start_N, self.cache.num_columns)
        span = self.rules.columns(shape.num_positions or 0, self.cache.num_columns)
        at_once = max(1, _MAX_RELATIVE_NUMBERS // (len(limit_N) * 2 * span))
        return _FlatLayout(num_content, span, places, seen, seen.after(num_content), at_once)

    def _layer_forward(self, layer: Any, index: int, states_ND: Tensor, layout: _AnyLayout) -> Tensor:
        key_value = self._linear(states_ND[: layout.num_content], layer.key_value_DD, None)
        self.cache.write(index, layout.places, key_value.view(-1, 2 * self.num_heads, self.head_width))
        start = layout.num_content if index == self.num_layers - 1 else 0
        rows_ND = states_ND[start:]
        query_ND = self._linear(rows_ND, layer.query_DD, None)
        if isinstance(layout, _FlatLayout):
            mixed_ND = self._flat_attention(layer, index, query_ND, layout)
        else:
            mixed_ND = self._attention(layer, index, query_ND, layout)
            if layout.blind_N is not None:
                mixed_ND.masked_fill_(layout.blind_N[start:].unsqueeze(1), 0.0)
        rows_ND = rows_ND + self._linear(mixed_ND, layer.output_DD, None)
        rows_ND = functional.layer_norm(rows_ND, (self.width,), *layer.attention_norm)
        inner = self.activation(self._linear(rows_ND, *layer.inner_1))
        rows_ND = rows_ND + self._linear(inner, *layer.inner_2)
        return functional.layer_norm(rows_ND, (self.width,), *layer.inner_norm)

    def _linear(self, rows_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        """A product whose rows do not depend on their number, as far as this device has one."""
        if self._product is not None:
            return self._product(rows_NK, weight_MK, bias_M)
        return invariance.at_least_rows(
            self.rules.min_rows, lambda rows: functional.linear(rows, weight_MK, bias_M), rows_NK
        )

    def _flat_attention(self, layer: Any, index: int, query_ND: Tensor, layout: _FlatLayout) -> Tensor:
        """Attend to the cache by the rows' limits, [N, H * d]."""
        middle = self.relative[index].shape[2] // 2
        keys_Hdp = self.relative[index][:, :, middle - layout.span : middle + layout.span]
        seen = layout.last if index == self.num_layers - 1 else layout.seen
        query_NHd = query_ND.view(-1, self.num_heads, self.head_width)
        position_NHd, content_NHd = query_NHd + layer.position_bias_Hd, query_NHd + layer.content_bias_Hd
        held_2SHWd, mixed, attend = self.cache.layers_2SKWd[index], [], cast("Attend", self._attend)
        for first in range(0, self.num_heads, layout.at_once):
            some = slice(first, first + layout.at_once)
            if self._product is not None:
                relative_NHP = self._product(position_NHd[:, some], keys_Hdp[some].transpose(1, 2))
            else:
                relative_NHP = torch.bmm(position_NHd[:, some].transpose(0, 1), keys_Hdp[some]).transpose(0, 1)
            asked = content_NHd[:, some], held_2SHWd[:, :, some], seen
            mixed.append(attend(*asked, scaling=1.0, relative_NHP=relative_NHP))
        return torch.cat(mixed, 1).flatten(1) if len(mixed) > 1 else mixed[0].flatten(1)

    def _attention(self, layer: Any, index: int, query_ND: Tensor, layout: _Layout) -> Tensor:
        """Spread flat query rows over the [B, T] rectangle, attend to the cache, gather them back; [N, H * d]. Positions are
        scored before rows are spread, unless there are so many scores that slots go in parts."""
        is_last = index == self.num_layers - 1
        first_row, rows_BT = (layout.num_content, layout.last_rows_BT) if is_last else (0, layout.rows_BT)
        num_slots, num_rows = rows_BT.shape
        query_NHd = query_ND.view(-1, self.num_heads, self.head_width)
        sight = layout.distance_N1W[first_row:], layout.hidden_N1W[first_row:]
        key, value = self.cache.read(index, layout.slots, sight[0].shape[2])
        at_once = max(1, _MAX_BIAS_NUMBERS // (self.num_heads * num_rows * 2 * layout.span))
        parts: list[Tensor] = []
        for first in range(0, num_slots, at_once):
            part = slice(first, first + at_once)
            rows_bT = rows_BT[part]
            flat: Any = query_NHd, *sight
            if at_once < num_slots:
                flat = [rows[rows_bT.flatten()] for rows in flat]
            both = flat[0] + layer.content_bias_Hd, self._relative_bias(layer, index, layout.span, *flat)
            content, bias = (
                (rows[rows_bT] if at_once >= num_slots else rows.unflatten(0, rows_bT.shape)).transpose(1, 2)
                for rows in both
            )
            mixed = invariance.attend(content, key[part], value[part], bias, self.rules.sum_columns)
            parts.append(mixed.transpose(1, 2).flatten(2))
        mixed_PD = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(0, 1)
        return mixed_PD.index_select(0, layout.rectangle_N[first_row:])

    def _relative_bias(
        self, layer: Any, index: int, span: int, query_NHd: Tensor, distance_N1W: Tensor, hidden_N1W: Tensor
    ) -> Tensor:
        """Scores of the relative positions, -inf where a column is not to be seen; [N, H, W]."""
        middle = self.relative[index].shape[2] // 2
        keys_Hdp = self.relative[index][:, :, middle - span : middle + span]
        scores_NHp = invariance.position_scores(query_NHd + layer.position_bias_Hd, keys_Hdp, self.rules.min_rows)
        bias_NHW = scores_NHp.gather(2, distance_N1W.expand(-1, self.num_heads, -1))
        return bias_NHW.masked_fill_(hidden_N1W, -torch.inf)

    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        return self._linear(hidden_RD, self.output_VD, self.output_bias_V)

    def embed(self, tokens_R: Tensor) -> Tensor:
        return self.embedding_VD[tokens_R]
