"""Intervals and tests for paired comparisons: the bootstrap over rows, sign flips, McNemar's exact test. Pure.

Samples of one row are not independent, so rows are resampled, never single samples. A statistic here is a function of sums over
rows, such as a ratio of two sums; one set of resamples serves all statistics of a comparison. The work is bounded: more
than GROUPS rows are first put at random into GROUPS groups, whose sums are resampled in place of the rows' own. The
groups of a random partition vary as the rows do, so this changes the intervals by less than their own noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.95
ALPHA: Final = 0.05
RESAMPLES: Final = 9999
GROUPS: Final = 10_000
SEED: Final = 0
MIN_ROWS: Final = 20
"""Below this number of rows a bootstrap interval is too narrow; the reports say so."""

_BATCH_CELLS: Final = 2_000_000
_EXACT_UP_TO: Final = 13

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""A function of sums [..., S], to [...]; must not modify them."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its bootstrap interval at LEVEL; without bounds where the rows allow none (fewer than two)."""

    value: float
    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the interval contains a value; True without bounds, where nothing is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high


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
def bootstrap(sums_GS: Floats, statistics: Sequence[Statistic], *, resamples: int = RESAMPLES) -> list[Interval]:
    """The statistics of the sums over all groups, each with its BCa interval (Efron 1987): bias-corrected and accelerated.

    The method of `scipy.stats.bootstrap(..., method="BCa")`, for functions of sums: then a resample is a weighted sum, and the
    jackknife leaves one summand out. A statistic that is not finite has the value NaN and no interval.
    """
    total_S = sums_GS.sum(axis=0)
    values = [float(statistic(total_S)) for statistic in statistics]
    if len(sums_GS) < 2:
        return [Interval(value) for value in values]
    drawn_RS = np.concatenate([weights_BG @ sums_GS for weights_BG in _weights(len(sums_GS), resamples)])
    left_out_GS = total_S - sums_GS
    return [
        Interval(value, *_bca(value, statistic(drawn_RS), statistic(left_out_GS)))
        for statistic, value in zip(statistics, values, strict=True)
    ]


def _weights(num_groups: int, resamples: int) -> Iterator[Floats]:
    """How often each group is in each resample, [batch, G], some resamples at a time."""
    rng = np.random.default_rng(SEED)
    batch = max(1, _BATCH_CELLS // num_groups)
    for start in range(0, resamples, batch):
        count = min(batch, resamples - start)
        drawn_BG = rng.integers(0, num_groups, size=(count, num_groups))
        drawn_BG += np.arange(count)[:, None] * num_groups
        yield np.bincount(drawn_BG.ravel(), minlength=count * num_groups).reshape(count, num_groups).astype(np.float64)


def _bca(value: float, drawn_R: Floats, left_out_G: Floats) -> tuple[float, float] | tuple[None, None]:
    from scipy.special import ndtr, ndtri

    if not (np.isfinite(value) and np.isfinite(drawn_R).all() and np.isfinite(left_out_G).all()):
        return None, None
    if np.ptp(drawn_R) <= 1e-12 * abs(value):
        return value, value
    below = (np.mean(drawn_R < value) + np.mean(drawn_R <= value)) / 2
    bias = ndtri(below)
    influence_G = left_out_G.mean() - left_out_G
    spread = float((influence_G**2).sum())
    acceleration = float((influence_G**3).sum()) / (6 * spread**1.5) if spread else 0.0
    tails = ndtri(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    shares = ndtr(bias + (bias + tails) / (1 - acceleration * (bias + tails)))
    if not np.isfinite(shares).all():  # all resamples on one side of the value
        return None, None
    low, high = np.quantile(drawn_R, shares)
    return float(low), float(high)


def sign_flip_p(difference_G: Floats, *, resamples: int = RESAMPLES) -> float:
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
    for start in range(0, resamples, batch):
        shape = (min(batch, resamples - start), len(moved))
        signs = rng.integers(0, 2, size=shape, dtype=np.int8).astype(np.float64) * 2 - 1
        extreme += int((np.abs(signs @ moved) >= observed).sum())
    return (extreme + 1) / (resamples + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """McNemar's exact test: of the pairs that differ, is either side the more frequent one? (McNemar 1947, exact binomial)"""
    from scipy.stats import binomtest

    total = only_first + only_second
    return float(binomtest(only_first, total, 0.5).pvalue) if total else 1.0


def wilson(hits: int, total: int) -> Interval:
    """A share with its Wilson interval (Wilson 1927)."""
    from scipy.stats import binomtest

    if not total:
        return Interval(float("nan"))
    bounds: Any = binomtest(hits, total).proportion_ci(confidence_level=LEVEL, method="wilson")
    return Interval(hits / total, float(bounds.low), float(bounds.high))
