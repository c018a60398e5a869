"""Shape rules that make a sample's arithmetic independent of its neighbours, and the self-test that picks them.

A matrix product may sum in another order when its shape changes, and one changed bit can change a token. On a CPU the order
depends on few things: very small row counts, few query rows, odd key counts, and sums so long that the library splits them.
Three roundings and one fixed order remove all of them:

* linear layers run on at least `min_rows` rows and attention on at least `min_queries` query rows a key head;
* key counts are rounded up to a multiple of `column_multiple`;
* the second product of attention (weights x values), the only one that sums over columns, adds `sum_columns` columns at a time,
  in the order of the columns. The length of the longest neighbour then changes nothing: columns beyond a row's own have
  weight 0, and adding 0 changes no bit.

The sufficient values differ between machines: `find_rules` tries candidates, cheapest first, over lengths up to the
model's own. Knows nothing of models beyond their widths.

Legend: C slots x heads, T query rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

EXACT_DTYPES: Final = (torch.float32, torch.float64)
"""The dtypes with our own attention products on a CPU; half precision uses torch's fused ones, without guarantees."""
VECTOR: Final = 32
"""Elementwise kernels compute the last few numbers of a tensor or a line differently; whole blocks of these leave none."""


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """Lower bounds and multiples that every forward keeps. `exact` says whether the self-test found them sufficient."""

    min_rows: int
    min_queries: int
    column_multiple: int
    sum_columns: int
    exact: bool

    def columns(self, num_columns: int, capacity: int) -> int:
        """Round a key count up, within the cache's capacity (itself a multiple)."""
        return min(capacity, -(-max(num_columns, 1) // self.column_multiple) * self.column_multiple)


NO_RULES: Final = ShapeRules(min_rows=1, min_queries=1, column_multiple=32, sum_columns=1 << 30, exact=False)
"""The rules on a GPU: torch's kernels change with the shape despite any rounding, and those of fixed tiles with no shape, so
nothing is padded."""
INEXACT_RULES: Final = ShapeRules(min_rows=16, min_queries=8, column_multiple=128, sum_columns=128, exact=False)
"""The rules on a CPU if no candidate suffices (float64, half precision): neighbours then rarely change bits."""
_ROW_CANDIDATES: Final = (1, 4, 16, 32)
# min_queries, column_multiple, sum_columns.
_ATTENTION_CANDIDATES: Final = ((4, 32, 128), (4, 64, 128), (8, 64, 64), (8, 128, 128), (8, 32, 32), (16, 32, 32))
# Visible columns to look at, among them both sides of the blocks' edges and the counts at which libraries were seen to split.
_LENGTHS: Final = (1, 31, 97, 128, 129, 185, 250, 300, 383, 513, 777, 1025, 1500, 2047)
_LONGEST: Final = 2048
# Longer texts are not tried: their keys would take gigabytes.
_FARTHEST: Final = 1 << 20
# Columns beyond the longest text, since blocks are whole; heads x columns of the self-test's keys.
_SPARE: Final = 256
_MOST_CELLS: Final = 1 << 18
NUM_PROBE_ROWS: Final = 300
"""Query rows that an `Attention` under test holds."""
_ROW_COUNTS: Final = (1, 2, 3, 5, 16, 17, 33, 64, 129, 257)


def at_least_rows(min_rows: int, function: Callable[..., Tensor], first: Tensor, **others: Tensor) -> Tensor:
    """Call a row-wise function on tensors padded to `min_rows` rows; the padding is cut off its result."""
    num_rows = first.shape[0]
    if num_rows >= min_rows:
        return function(first, **others)
    padded = {name: _pad_rows(rows, min_rows) for name, rows in others.items()}
    return function(_pad_rows(first, min_rows), **padded)[:num_rows]


def _pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - rows.shape[0], *rows.shape[1:])])


def weigh_values(weights_CTW: Tensor, value_CWd: Tensor, sum_columns: int) -> Tensor:
    """Sum values by their weights, [C, T, d]: `sum_columns` columns at a time, one block of columns after the other. The order
    in which each output is summed depends on nothing else: not on W, and so not on the longest neighbour."""
    if weights_CTW.shape[2] <= sum_columns:
        return torch.bmm(weights_CTW, value_CWd)
    mixed = torch.bmm(weights_CTW[:, :, :sum_columns], value_CWd[:, :sum_columns])
    for first in range(sum_columns, weights_CTW.shape[2], sum_columns):
        block = slice(first, first + sum_columns)
        mixed.baddbmm_(weights_CTW[:, :, block], value_CWd[:, block])
    return mixed


def attend(query_BHTd: Tensor, key_BHWd: Tensor, value_BHWd: Tensor, bias_BHTW: Tensor, sum_columns: int) -> Tensor:
    """Softmax attention with an additive bias that also carries the mask; queries are already scaled. [B, H, T, d]."""
    key, value = key_BHWd.flatten(0, 1), value_BHWd.flatten(0, 1)
    scores = torch.baddbmm(bias_BHTW.flatten(0, 1), query_BHTd.flatten(0, 1), key.transpose(1, 2))
    return weigh_values(scores.softmax(-1), value, sum_columns).view(query_BHTd.shape)


def position_scores(query_NHd: Tensor, keys_Hdp: Tensor, min_rows: int) -> Tensor:
    """Products of every query with the keys of all distances, [N, H, p] (a view), on at least `min_rows` rows a head. One
    product a head over the rows of all slots: the keys of distances are the same for every slot and are not copied."""
    num_rows = query_NHd.shape[0]
    if num_rows < min_rows:
        query_NHd = functional.pad(query_NHd, (0, 0, 0, 0, 0, min_rows - num_rows))
    return torch.bmm(query_NHd.transpose(0, 1), keys_Hdp)[:, :num_rows].transpose(0, 1)


Product = tuple[Callable[[Tensor], Tensor], int, int, torch.dtype]
"""What multiplies rows by a matrix, the widths of input and output, and their dtype."""
Attention = Callable[[int, slice, int, int, ShapeRules], Tensor]
"""(slots, rows, visible, columns, rules) -> [slots, rows, ...]: attention over random keys and values that the caller holds, by
the first slots and columns and some of its `NUM_PROBE_ROWS` rows; columns from `visible` on are hidden."""


def find_rules(
    products: Sequence[Product], attention: Attention, dtype: torch.dtype, *, longest: int | None, least_rows: int = 0
) -> ShapeRules:
    """Return the cheapest rules under which rows of a model agree bit by bit on this machine, or `INEXACT_RULES`. `longest` is
    its longest text where that is known. `least_rows` is the fewest rows that attention is ever asked for; 0 stands for
    `min_queries`."""

    def are_exact(min_rows: int) -> bool:
        rows = ((product, normal(0, NUM_PROBE_ROWS, width).to(number)) for product, width, _, number in products)
        return all(rows_exact(product, rows_NK, min_rows) for product, rows_NK in rows)

    min_rows = next(filter(are_exact, _ROW_CANDIDATES), None)
    for candidate in _ATTENTION_CANDIDATES if min_rows is not None else ():
        rules = ShapeRules(min_rows or 1, *candidate, exact=dtype in EXACT_DTYPES)
        if _attention_exact(attention, rules, _held(longest), least_rows or rules.min_queries):
            return rules
    return INEXACT_RULES if min_rows is None else replace(INEXACT_RULES, min_rows=min_rows)


def _attention_exact(attention: Attention, rules: ShapeRules, longest: int, least_rows: int) -> bool:
    few = slice(0, least_rows + 9)
    # Pairs of visible columns and the most columns to compare them with; a few reach up to the model's longest text.
    far = [(visible, longest) for visible in (129, longest // 2 + 1, longest - 1)] if longest > _LONGEST else []
    for visible, most in [*((visible, _LONGEST) for visible in _LENGTHS), *far]:
        widest = -(-most // rules.column_multiple) * rules.column_multiple
        whole = attention(2, few, visible, widest, rules)
        for slots, rows, columns in _shapes(visible, widest, rules, least_rows):
            if not torch.equal(attention(slots, rows, visible, columns, rules), whole[:slots, rows]):
                return False
    visible, columns = 385, 512
    whole = attention(1, slice(0, NUM_PROBE_ROWS), visible, columns, rules)
    for count in (count for count in _ROW_COUNTS if count >= least_rows):
        for rows in (slice(0, count), slice(NUM_PROBE_ROWS - count, NUM_PROBE_ROWS)):
            if not torch.equal(attention(1, rows, visible, columns, rules), whole[:, rows]):
                return False
    return True


def _shapes(visible: int, widest: int, rules: ShapeRules, least_rows: int) -> Iterator[tuple[int, slice, int]]:
    """Shapes (slots, rows, columns) to compare with the widest one: each number of columns with other slots and rows."""
    tight = rules.columns(visible, widest)
    block = rules.sum_columns
    edge = -(-tight // block) * block
    widths = sorted({tight, tight + rules.column_multiple, edge, edge + block, (tight + widest) // 2, widest})
    for number, width in enumerate(widths):
        columns = rules.columns(width, widest)
        first = (0, 3, 8)[number % 3]
        yield 1 + number % 2, slice(first, first + least_rows + (0, 4, 1)[number % 3]), columns


def rows_exact(function: Callable[[Tensor], Tensor], rows_NK: Tensor, min_rows: int) -> bool:
    """Whether a row-wise function gives the first rows the same bits for any number (>= min_rows) of rows."""
    whole = function(rows_NK)
    counts = (*range(min_rows, min_rows + 8), min_rows + 15, 47, 64, 129, 300)
    return all(torch.equal(function(rows_NK[:count]), whole[:count]) for count in counts if count <= rows_NK.shape[0])


def normal(seed: int, *shape: int) -> Tensor:
    """Random normal numbers, the same for a seed and a shape; float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probe_columns(seed: int, longest: int | None, *, heads: int, width: int) -> Tensor:
    """Random keys or values [2, heads, W, width] for an `Attention` under test, W as long as `find_rules` asks for. Far columns
    repeat near ones, which is quick to fill; a very long text is tried with few heads."""
    num_columns = _held(longest) + _SPARE
    near = normal(seed, 2, max(1, min(heads, _MOST_CELLS // num_columns)), _LONGEST + _SPARE, width)
    return near.repeat(1, 1, -(-num_columns // near.shape[2]), 1)[:, :, :num_columns]


def _held(longest: int | None) -> int:
    """The longest text that the self-test tries."""
    return min(max(longest or 0, _LONGEST), _FARTHEST)
