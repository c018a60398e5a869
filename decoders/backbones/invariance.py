"""Shape rules that make a sample's arithmetic independent of its neighbours, and the self-test that picks them.

A matrix product may sum in another order when its shape changes, and one changed bit can change a token. On a CPU the order
depends on few things: very small row counts, few query rows, and odd key counts take other kernels. Rounding these shapes up
makes a row's result the same, bit by bit, in any batch. Which rounding is enough differs from machine to machine; `choose_rules`
tries, cheapest first. Knows nothing of models beyond their widths.

Legend: N token rows, B slots, H heads, T query rows, W key columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Lower bounds and multiples that every forward keeps. `exact` says whether the self-test found them sufficient."""

    min_rows: int
    min_queries: int
    column_multiple: int
    exact: bool

    def columns(self, num_columns: int, capacity: int) -> int:
        """Round a key count up, within the cache's capacity (itself a multiple)."""
        return min(capacity, -(-max(num_columns, 1) // self.column_multiple) * self.column_multiple)


NO_RULES = ShapeRules(min_rows=1, min_queries=1, column_multiple=32, exact=False)
"""What a GPU gets: its kernels change with the shape whatever is rounded, so nothing is padded in vain."""
_CANDIDATES = ((1, 4, 32), (4, 4, 32), (16, 4, 32), (16, 4, 64), (32, 8, 128), (32, 8, 512))


def linear_rows(rows_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, min_rows: int) -> Tensor:
    """`functional.linear` on at least `min_rows` rows; the padding is cut off again."""
    num_rows = rows_NK.shape[0]
    if num_rows >= min_rows:
        return functional.linear(rows_NK, weight_MK, bias_M)
    padded = rows_NK.new_zeros(min_rows, rows_NK.shape[1])
    padded[:num_rows] = rows_NK
    return functional.linear(padded, weight_MK, bias_M)[:num_rows]


def at_least_rows(min_rows: int, function: Callable[..., Tensor], first: Tensor, **others: Tensor) -> Tensor:
    """Call a row-wise function on tensors padded to `min_rows` rows; the padding is cut off its result."""
    num_rows = first.shape[0]
    if num_rows >= min_rows:
        return function(first, **others)
    padded = {name: _padded(rows, min_rows) for name, rows in others.items()}
    return function(_padded(first, min_rows), **padded)[:num_rows]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - rows.shape[0], *rows.shape[1:])])


def attend(query_BHTd: Tensor, key_BHWd: Tensor, value_BHWd: Tensor, bias_BHTW: Tensor) -> Tensor:
    """Softmax attention with an additive bias that also carries the mask; queries are already scaled. [B, H, T, d]."""
    key, value = key_BHWd.flatten(0, 1), value_BHWd.flatten(0, 1)
    scores = torch.baddbmm(bias_BHTW.flatten(0, 1), query_BHTd.flatten(0, 1), key.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), value).view(query_BHTd.shape)


def position_scores(query_BHTd: Tensor, keys_Hdp: Tensor, min_rows: int) -> Tensor:
    """Products of every query with the keys of all distances, [B, H, T, p] (a view), on at least `min_rows` rows a head.

    One product a head over the rows of all slots: the keys of distances are the same for every slot and are not copied.
    """
    num_slots, num_heads, num_queries, head_width = query_BHTd.shape
    num_rows = num_slots * num_queries
    rows_HRd = query_BHTd.new_zeros(num_heads, max(num_rows, min_rows), head_width)
    rows_HRd[:, :num_rows] = query_BHTd.transpose(0, 1).reshape(num_heads, num_rows, head_width)
    scores_HRp = torch.bmm(rows_HRd, keys_Hdp)[:, :num_rows]
    return scores_HRp.view(num_heads, num_slots, num_queries, -1).transpose(0, 1)


@functools.lru_cache(maxsize=8)
def choose_rules(
    width: int, inner: int, vocab_size: int, num_heads: int, dtype: torch.dtype, threads: int
) -> ShapeRules:
    """Return the cheapest rules under which rows agree bit by bit on this machine; tens of milliseconds, cached.

    `threads` is part of the question, since it moves the boundaries between kernels. Without any sufficient candidate the
    strictest one comes back with exact=False.
    """
    return first_exact(
        lambda rules: (
            _linear_exact(width, inner, vocab_size, dtype, rules.min_rows)
            and _attention_exact(num_heads, width // num_heads, dtype, rules)
        )
    )


def first_exact(is_exact: Callable[[ShapeRules], bool]) -> ShapeRules:
    """Return the cheapest rules that pass a test; without any, the strictest ones with exact=False."""
    for candidate in _CANDIDATES:
        rules = ShapeRules(*candidate, exact=True)
        if is_exact(rules):
            return rules
    return ShapeRules(*_CANDIDATES[-1], exact=False)


def rows_exact(function: Callable[[Tensor], Tensor], rows_NK: Tensor, min_rows: int) -> bool:
    """Whether a row-wise function gives the first rows the same bits, however many (>= min_rows) come along."""
    whole = function(rows_NK)
    few = (*range(min_rows, min_rows + 8), min_rows + 15)
    counts = (*few, 47, 64, 129, 300)
    return all(torch.equal(function(rows_NK[:count]), whole[:count]) for count in counts if count <= rows_NK.shape[0])


def _linear_exact(width: int, inner: int, vocab_size: int, dtype: torch.dtype, min_rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for num_in, num_out in ((width, width), (width, inner), (inner, width), (width, vocab_size)):
        weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
        rows = torch.randn(512, num_in, generator=generator).to(dtype)
        if not rows_exact(functools.partial(functional.linear, weight=weight), rows, min_rows):
            return False
    return True


def _attention_exact(num_heads: int, head_width: int, dtype: torch.dtype, rules: ShapeRules) -> bool:
    generator = torch.Generator().manual_seed(1)
    num_slots, num_queries, num_visible = 5, rules.min_queries + 9, min(100, rules.column_multiple * 3)
    longest = -(-512 // rules.column_multiple) * rules.column_multiple
    query, key, value = (
        torch.randn(num_slots, num_heads, count, head_width, generator=generator).to(dtype)
        for count in (num_queries, longest, longest)
    )
    bias = torch.randn(num_slots, num_heads, num_queries, longest, generator=generator).to(dtype)
    bias[..., num_visible:] = -torch.inf
    distances = key[0].transpose(1, 2).contiguous()
    whole, scores = attend(query, key, value, bias), position_scores(query, distances, rules.min_rows)
    for slots, queries, columns in shapes_to_compare(num_slots, num_visible, rules):
        part = query[:slots, :, :queries]
        near = slice(0, columns)
        mixed = attend(part, key[:slots, :, near], value[:slots, :, near], bias[:slots, :, :queries, near])
        product = position_scores(part, distances[:, :, near], rules.min_rows)
        if not torch.equal(mixed, whole[:slots, :, :queries]):
            return False
        if not torch.equal(product, scores[:slots, :, :queries, near]):
            return False
    return True


def shapes_to_compare(num_slots: int, num_visible: int, rules: ShapeRules) -> list[tuple[int, int, int]]:
    """Shapes (slots, queries, columns) of attention to hold against the largest one, in which 512 columns are there."""
    multiple = rules.column_multiple
    least = -(-num_visible // multiple) * multiple
    return [
        (slots, rules.min_queries + more, least + step * multiple)
        for slots in (1, 2, num_slots)
        for more in (0, 1, 4)
        for step in (0, 1, 3)
        if least + step * multiple <= 512 or step == 0
    ]
