"""Intervals and tests for paired comparisons: Student's t over rows, sign flips, McNemar's exact test. Pure.

Samples of one row are not independent, so rows are the unit, never single samples. A statistic here is a function of sums over
rows, such as a ratio of two sums. The work is bounded: more than GROUPS rows are first put at random into GROUPS groups, whose
sums take the place of the rows' own. The groups of a random partition vary as the rows do, so this changes the intervals by less
than their own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.95
ALPHA: Final = 0.05
FLIPS: Final = 9999
GROUPS: Final = 10_000
SEED: Final = 0
MIN_ROWS: Final = 20
"""Below this number of rows an interval may be too narrow; the reports say so."""

_BATCH_CELLS: Final = 2_000_000
_EXACT_UP_TO: Final = 13

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""A function of sums [..., S], to [...]; must not modify them."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its interval at LEVEL; without bounds where the rows allow none (fewer than two)."""

    value: float
    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the interval contains a value; True without bounds, where nothing is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    @property
    def bounds(self) -> tuple[float, ...]:
        """Low and high; empty without bounds."""
        return () if self.low is None or self.high is None else (self.low, self.high)


def grouped_sums(columns: Iterable[Floats], row_P: NDArray[np.int64]) -> Floats:
    """Sum each column [P] over the pairs of each row, and over random groups of rows if there are more than GROUPS; [G, S].

    `row_P` numbers the rows from 0 without gaps.
    """
    num_rows = int(row_P.max()) + 1 if len(row_P) else 0
    if num_rows > GROUPS:
        row_P = (np.random.default_rng(SEED).permutation(num_rows) % GROUPS)[row_P]
        num_rows = GROUPS
    return np.stack([np.bincount(row_P, weights=column_P, minlength=num_rows) for column_P in columns], axis=1)


def finite_values(values_P: Floats) -> tuple[Floats, Floats]:
    """The values with 0 where they are not finite, and 1 where they are: with the sums of both, `quotient` is their mean."""
    valid = np.isfinite(values_P)
    return np.where(valid, values_P, 0.0), valid.astype(np.float64)


def quotient(place: int) -> Statistic:
    """The sum at a place divided by the next one."""
    return lambda sums: sums[..., place] / sums[..., place + 1]


@np.errstate(divide="ignore", invalid="ignore")
def intervals_of(sums_GS: Floats, statistics: Sequence[Statistic]) -> list[Interval]:
    """The statistics of the sums over all groups, each with its Student t interval by the jackknife's standard error.

    For a mean over groups of equal size this is the t interval of the groups' means. A statistic that is not finite, with all
    groups or without one of them, has no interval.
    """
    total_S, num_groups = sums_GS.sum(axis=0), len(sums_GS)
    found = []
    for statistic in statistics:
        value = float(statistic(total_S))
        spread = math.nan
        if num_groups > 1:
            left_out_G = statistic(total_S - sums_GS)
            spread = math.sqrt((num_groups - 1) ** 2 / num_groups * float(left_out_G.var(ddof=1)))
        half = 0.0 if spread <= 1e-12 * abs(value) else t_quantile(num_groups - 1) * spread
        found.append(Interval(value, value - half, value + half) if math.isfinite(half) else Interval(value))
    return found


def t_quantile(freedom: float) -> float:
    """How many standard errors an interval at LEVEL reaches to each side."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2)) if freedom > 0 else math.nan


def sign_flip_p(difference_G: Floats, *, flips: int = FLIPS) -> float:
    """Two-sided p-value of the permutation test for a mean paired difference: under no effect every sign is as likely.

    The test of `scipy.stats.permutation_test(..., permutation_type="samples")` for two samples. `difference_G` are sums over
    rows or groups of rows. Exact for up to 13 of them that are not zero, else over random sign flips.
    """
    moved = difference_G[difference_G != 0]
    if not len(moved):
        return 1.0
    observed = abs(float(moved.sum())) * (1 - 1e-12)
    if len(moved) <= _EXACT_UP_TO:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return float(np.mean(np.abs(signs @ moved) >= observed))
    rng = np.random.default_rng(SEED)
    batch = max(1, _BATCH_CELLS // len(moved))
    extreme = 0
    for start in range(0, flips, batch):
        shape = (min(batch, flips - start), len(moved))
        signs = rng.integers(0, 2, size=shape, dtype=np.int8).astype(np.float64) * 2 - 1
        extreme += int((np.abs(signs @ moved) >= observed).sum())
    return (extreme + 1) / (flips + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """McNemar's exact test: of the pairs that differ, is either side the more frequent one? (McNemar 1947, exact binomial)"""
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total, 0.5).pvalue) if total else 1.0


def mean_of(values_P: Floats, row_P: NDArray[np.int64] | None) -> Interval:
    """The mean of the finite values, with an interval over the rows `row_P`; without these, Wilson's of zeros and ones."""
    if row_P is None:
        return wilson(int(np.nansum(values_P)), int(np.isfinite(values_P).sum()))
    [interval] = intervals_of(grouped_sums(finite_values(values_P), row_P), [quotient(0)])
    return interval


def wilson(hits: int, total: int) -> Interval:
    """A share with its Wilson interval (Wilson 1927)."""
    from scipy.stats import binomtest

    if not total:
        return Interval(float("nan"))
    bounds: Any = binomtest(hits, total).proportion_ci(confidence_level=LEVEL, method="wilson")
    return Interval(hits / total, float(bounds.low), float(bounds.high))
