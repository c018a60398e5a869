"""Estimates the seconds of a forward (a + b x tokens + c x kv_tokens, corrected by the measured times of each size), and compares
allocations of drafts to slots by expected gain and cost.

All times come from the run's own forwards, and only the choice of how many tokens to draft (budget.py) depends on them. Forwards
are kept in cells by their number of tokens, so that frequent sizes do not push out rare ones. A straight line alone does not
fit: on a GPU tokens are free up to some number and cost time beyond it.

Legend: P cells, N numbers of tokens, C allocations.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

_CELLS_PER_OCTAVE: Final = 4
_MEMORY: Final = 16
# The weight of the line's estimate against a cell's, in forwards.
_LINE_WEIGHT: Final = 1.0
# From this many cells on, the cost of reading keys can be separated from that of computing tokens.
_CELLS_FOR_KEYS, _KEYS_VARY = 5, 0.2
_FIT_EVERY: Final = 16
# How much larger than all previous steps a step may be.
_GROWTH: Final = 2.0
# The speed-up that an unmeasured size must promise at best before it is tried.
_HOPE: Final = 1.1
# Where a ragged rectangle of rows may be cut, and what a copied slot costs in lines.
_CUTS, _COPY = (1, 2, 3, 5, 9), 8


_Cell = deque[tuple[int, int, float]]
"""The last forwards of about one size: tokens, kv tokens, seconds."""


def _typical(cell: _Cell) -> tuple[int, float, float, float]:
    """(how many, tokens, kv tokens, seconds): the median of the seconds, since a busy machine holds some forwards up."""
    tokens, kv_tokens, seconds = zip(*cell, strict=True)
    count = len(cell)
    return count, sum(tokens) / count, sum(kv_tokens) / count, median(seconds)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by size: through the cells, flat before the first, along the line after the last."""

    base: float
    per_token: float
    per_kv_token: float
    tokens_P: Numbers
    seconds_P: Numbers
    """Seconds of the cells without the time for their keys; non-decreasing."""

    def seconds(self, tokens_N: Numbers, kv_tokens: Numbers | float) -> Numbers:
        """Estimate the seconds of forwards from their rows and the columns that they read."""
        beyond_N = np.maximum(tokens_N - self.tokens_P[-1], 0.0)
        within_N: Numbers = np.interp(tokens_N, self.tokens_P, self.seconds_P)
        return within_N + self.per_token * beyond_N + self.per_kv_token * kv_tokens

    def at_least(self, tokens_N: Numbers, kv_tokens: Numbers | float) -> Numbers:
        """The same, but optimistic: an unmeasured size costs no more than the next smaller measured one."""
        octaves_NP = np.abs(np.log2(tokens_N)[:, None] - np.log2(self.tokens_P))
        unmet_N = octaves_NP.min(1) > 0.5 / _CELLS_PER_OCTAVE
        below_N = np.searchsorted(self.tokens_P, tokens_N, side="right").clip(min=1) - 1
        least_N = self.seconds_P[below_N] + self.per_kv_token * kv_tokens
        return np.where(unmet_N, least_N, self.seconds(tokens_N, kv_tokens))


class CostTable:
    """Measured forwards, and the estimates that follow from them."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._num_seen = 0
        self._num_new = 0
        self._cost: Cost | None = None

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Add one forward: rows computed, columns read (summed over its slots), seconds."""
        self._num_seen += 1
        if self._num_seen == 1 or tokens < 1:
            return  # The first forward allocates memory and chooses kernels.
        size = round(_CELLS_PER_OCTAVE * math.log2(tokens))
        self._num_new += _FIT_EVERY if size not in self._cells else 1
        self._cells.setdefault(size, deque(maxlen=_MEMORY)).append((tokens, kv_tokens, seconds))

    def cost(self) -> Cost | None:
        """The current estimates; None before the second forward."""
        if self._cells and (self._cost is None or self._num_new >= _FIT_EVERY):
            self._cost, self._num_new = _fit([self._cells[size] for size in sorted(self._cells)]), 0
        return self._cost


def _fit(cells: list[_Cell]) -> Cost:
    """Fit least squares of relative errors, weighted by the recent forwards of each cell; then correct it by each cell."""
    typical = np.array([_typical(cell) for cell in cells])
    num_P, seconds_P = typical[:, 0], np.maximum(typical[:, 3], 1e-9)
    features = np.column_stack([np.ones(len(cells)), typical[:, 1:3]])
    weights_P = np.sqrt(num_P) / seconds_P
    if len(cells) == 1:
        # One size tells nothing about others: assume that half of its time is a fixed cost.
        coefficients = np.array([seconds_P[0] / 2, seconds_P[0] / 2 / features[0, 1], 0.0])
    else:
        # If all forwards read about the same number of keys, their cost cannot be separated from the fixed cost.
        varied = float(np.ptp(features[:, 2])) > _KEYS_VARY * float(features[:, 2].mean())
        columns = [0, 1, 2] if len(cells) >= _CELLS_FOR_KEYS and varied else [0, 1]
        coefficients = _non_negative(features * weights_P[:, None], seconds_P * weights_P, columns)
    line_P = features[:, :2] @ coefficients[:2]
    own_P = np.maximum(seconds_P - coefficients[2] * features[:, 2], 0.0)
    mixed_P = (num_P * own_P + _LINE_WEIGHT * line_P) / (num_P + _LINE_WEIGHT)
    return Cost(
        base=float(coefficients[0]),
        per_token=float(coefficients[1]),
        per_kv_token=float(coefficients[2]),
        tokens_P=features[:, 1].copy(),
        seconds_P=_never_falling(mixed_P, num_P),
    )


def _non_negative(features: Numbers, targets: Numbers, columns: list[int]) -> Numbers:
    """Solve least squares over these columns; a negative coefficient is set to zero, the last column's first."""
    coefficients = np.zeros(features.shape[1])
    while columns:
        scale = np.linalg.norm(features[:, columns], axis=0)
        scale[scale == 0.0] = 1.0
        solution = np.linalg.lstsq(features[:, columns] / scale, targets, rcond=1e-9)[0] / scale
        if (solution >= 0.0).all():
            coefficients[columns] = solution
            break
        columns = [column for column in columns if column != columns[int(np.flatnonzero(solution < 0.0)[-1])]]
    return coefficients


def _never_falling(values_P: Numbers, weights_P: Numbers) -> Numbers:
    """The nearest non-decreasing sequence (pool adjacent violators): a larger forward is never the faster one."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values_P.tolist(), weights_P.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (value_2, weight_2, count_2), (value_1, weight_1, count_1) = pools.pop(), pools.pop()
            weight_12 = weight_1 + weight_2
            mean = (value_1 * weight_1 + value_2 * weight_2) / weight_12
            pools.append((mean, weight_12, count_1 + count_2))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])


# ---- allocations -----------------------------------------------------------------------------------------------------


def lines_a_slot(rows_CB: Counts) -> Numbers:
    """The average lines of attention per slot, given the rows of each slot, [C]; see attention.cut_ragged. The rectangle is as
    wide as the largest slot, or cut into a narrow one and copies of the slots that have more."""
    num_slots, most_C = rows_CB.shape[1], rows_CB.max(1)
    lines_C = most_C * num_slots
    for cut in _CUTS:
        num_more_C = (rows_CB > cut).sum(1)
        lines_C = np.where(
            num_more_C > 0, np.minimum(lines_C, cut * num_slots + num_more_C * (most_C - cut + _COPY)), lines_C
        )
    return lines_C / num_slots


@dataclass(frozen=True, slots=True)
class Offers:
    """Allocations with the gain and the cost of each; the last one drafts nothing."""

    counts_CB: Counts
    gain_C: Numbers
    rows_C: Numbers
    drafting_C: Numbers
    cost: Cost
    kv_C: Numbers

    def _rates(self, seconds_C: Numbers) -> Numbers:
        """Tokens per second; 0 for allocations much larger than any measured one."""
        near_C = self.rows_C <= max(_GROWTH * float(self.cost.tokens_P[-1]), self.rows_C[-1])
        return np.where(near_C, self.gain_C / (seconds_C + self.drafting_C), 0.0)

    def fastest(self, margin: float) -> tuple[Counts, float]:
        """The allocation with the most tokens per second, and its rate; no drafts if below `margin` times the plain rate."""
        rate_C = self._rates(self.cost.seconds(self.rows_C, self.kv_C))
        drafting_C = np.where(self.counts_CB.any(1), rate_C, 0.0)
        best = int(drafting_C.argmax())
        best = best if drafting_C[best] >= margin * rate_C[-1] else len(rate_C) - 1
        return self.counts_CB[best], float(rate_C[best])

    def hopeful(self, rate: float, otherwise: Counts) -> Counts:
        """An allocation of unmeasured size that might be much faster than `rate`, if there is one."""
        hope_C = self._rates(self.cost.at_least(self.rows_C, self.kv_C))
        best = int(hope_C.argmax())
        return self.counts_CB[best] if hope_C[best] > _HOPE * rate else otherwise

    def worth(self, rate: float) -> Counts:
        """The allocation with the largest gain after subtracting its time, valued at this rate."""
        seconds_C = self.cost.per_token * self.rows_C + self.drafting_C
        return self.counts_CB[int((self.gain_C - rate * seconds_C).argmax())]
