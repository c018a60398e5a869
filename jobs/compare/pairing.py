"""Pairs of samples, and what they are worth: the noise that two runs share, and the rows that an interval needs. Pure.

A sample's noise is a function of its key, the position and the token (decoders/draws/noise.py), so runs with equal seeds are
coupled sample by sample: common random numbers. That a row is easy or hard couples its samples, too, whatever their noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.common_settings import MOST_SAMPLES
from draftmill.jobs.compare.rows import RunRows, positions, row_numbers
from draftmill.jobs.compare.runs import FinishedRun, same_tokenizer
from draftmill.jobs.compare.statistics import LEVEL, MIN_ROWS, Floats, Interval, t_quantile
from draftmill.jobs.formatting import counted

_ROUNDING: Final = 1e-9
"""Values that differ by less, relative to the largest, are equal but for rounding."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of samples that are ok in both runs: their positions in each run, and the number of each pair's row, from 0.

    `both` counts these pairs and the failed ones: `failed_first`, `failed_second` (failed in one run only) and `failed_both`.
    `only_first` and `only_second` count samples without a partner.
    """

    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]
    row_P: NDArray[np.int64]
    both: int
    only_first: int
    only_second: int
    failed_first: int
    failed_second: int
    failed_both: int

    @property
    def num_compared(self) -> int:
        """Pairs that are ok in both runs."""
        return len(self.first_P)

    @property
    def num_rows(self) -> int:
        """Distinct input rows of these pairs."""
        return int(self.row_P.max()) + 1 if len(self.row_P) else 0

    @property
    def clustered(self) -> bool:
        """Whether a row has several pairs, which are then not independent."""
        return self.num_rows < self.num_compared


def pair(first: RunRows, second: RunRows) -> Pairs:
    """The pairs of two runs, in the order of the first."""
    place, other = positions(first.ids, first.sample_N, second.ids, second.sample_N)
    ok, other_ok = first.ok_N[place], second.ok_N[other]
    good = ok & other_ok
    rows = row_numbers(first.ids, first.ids)[place[good]]
    return Pairs(
        first_P=place[good],
        second_P=other[good],
        row_P=np.unique(rows, return_inverse=True)[1].astype(np.int64),
        both=len(place),
        only_first=first.num_rows - len(place),
        only_second=second.num_rows - len(place),
        failed_first=int((~ok & other_ok).sum()),
        failed_second=int((ok & ~other_ok).sum()),
        failed_both=int((~ok & ~other_ok).sum()),
    )


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """How many of the compared pairs draw from the same noise; `lost` says why the others do not, None if there are none."""

    pairs: int
    lost: str | None = None


def shared_noise(first: FinishedRun, baseline: RunRows, run: FinishedRun, rows: RunRows, pairs: Pairs) -> SharedNoise:
    """The pairs with equal keys and equally long prompts, if both runs draw their tokens in the same way."""
    if lost := _lost_by_settings(first, run):
        return SharedNoise(0, lost)
    same_key = baseline.key_N[pairs.first_P] == rows.key_N[pairs.second_P]
    lengths, other_lengths = baseline.counts["prompt_tokens"], rows.counts["prompt_tokens"]
    same_place = lengths[pairs.first_P] == other_lengths[pairs.second_P]
    reasons = {
        "have other seeds": int((~same_key).sum()),
        "have prompts of other lengths, and noise belongs to positions": int((same_key & ~same_place).sum()),
    }
    lost = " and ".join(f"{count:,} {why}" for why, count in reasons.items() if count)
    return SharedNoise(int((same_key & same_place).sum()), lost or None)


def _lost_by_settings(first: FinishedRun, run: FinishedRun) -> str | None:
    """Why no pair shares its noise, whatever the keys."""
    specs = [one.plan.spec for one in (first, run)]
    if not same_tokenizer(first.plan, run.plan):
        return "the tokenizers differ, and noise belongs to token ids"
    if specs[0].task.kind == "score":  # what an estimate masks is drawn, other scores are computed
        computed = all(spec.decoder.baseline.runs_on in {"causal", "any_subset"} for spec in specs)
        return "scores are computed without noise" if computed else None
    for one, spec in zip((first, run), specs, strict=True):
        if spec.sampling.temperature == 0 and spec.input.columns.temperature is None:
            return f"{one.name} draws nothing at temperature 0"
    ways = {(spec.sampling.acceptance, spec.decoder.kind) for spec in specs}
    if len(ways) > 1 and any(acceptance == "rejection" for acceptance, _ in ways):
        return "with sampling.acceptance 'rejection' each decoder draws from noise of its own"
    if len({getattr(spec.decoder.baseline, "draws_anew", False) for spec in specs}) > 1:  # others draw a position once
        return "one of the decoders draws anew in each step"
    return None


@dataclass(frozen=True, slots=True)
class Pairing:
    """What pairs do to the mean difference of a metric, over `rows` rows with at most `samples` pairs each.

    `unpaired` is the interval that two independent samples of this size would give (Welch). `worth` is the ratio of the
    variances without pairs and with them, and `worth_of_noise` the same against these rows with independent noise. `variance`
    is that of the mean, `between` that of the rows' expectations, `within` that of a sample in its row. What can't be computed is
    None, such as all that needs several samples of a row without them.
    """

    rows: int
    samples: int
    correlation: float | None = None
    correlation_within: float | None = None
    unpaired: Interval | None = None
    worth: float | None = None
    worth_of_noise: float | None = None
    variance: float = 0.0
    between: float | None = None
    within: float | None = None


def pairing_of(before_P: Floats, now_P: Floats, row_P: NDArray[np.int64], difference: Interval) -> Pairing:
    """The figures of P pairs of finite values; `difference` is the interval of the mean of now minus before, with pairs."""
    row_P = np.unique(row_P, return_inverse=True)[1]
    counts_G, num_pairs = np.bincount(row_P), len(row_P)
    rows, samples = len(counts_G), int(counts_G.max())
    rounding = _ROUNDING * float(max(np.abs(before_P).max(), np.abs(now_P).max()))
    if not difference.bounds or np.ptp(difference.bounds) <= rounding:
        return Pairing(rows, samples)
    variance = mean_variance(now_P - before_P, row_P)
    apart = [mean_variance(values_P, row_P) for values_P in (before_P, now_P)]
    freedom = (rows - 1) * sum(apart) ** 2 / sum(one**2 for one in apart)  # Welch
    half = t_quantile(freedom) * math.sqrt(sum(apart))
    figures = Pairing(
        rows=rows,
        samples=samples,
        correlation=_correlation(before_P, now_P, rounding),
        unpaired=Interval(difference.value, difference.value - half, difference.value + half),
        worth=sum(apart) / variance,
        variance=variance,
    )
    before_P, now_P = _within_rows(before_P, row_P), _within_rows(now_P, row_P)
    if max(np.abs(before_P).max(), np.abs(now_P).max()) <= rounding:
        return figures
    freedom = num_pairs - rows
    within = float(((now_P - before_P) ** 2).sum()) / freedom
    common = float((before_P * now_P).sum()) / freedom
    return replace(
        figures,
        correlation_within=_correlation(before_P, now_P, rounding),
        worth_of_noise=1 + 2 * common / num_pairs / variance,
        between=max(0.0, (variance * num_pairs - within) * num_pairs / float((counts_G**2).sum())),
        within=within,
    )


def mean_variance(values_P: Floats, row_P: NDArray[np.int64]) -> float:
    """The variance of the mean of P values: rows are independent, the values of one row are not (cluster-robust)."""
    sums_G = np.bincount(row_P, values_P - values_P.mean())
    return float((sums_G**2).sum()) * len(sums_G) / (len(sums_G) - 1) / len(values_P) ** 2


def _within_rows(values_P: Floats, row_P: NDArray[np.int64]) -> Floats:
    """The values minus the mean of their row."""
    return values_P - (np.bincount(row_P, values_P) / np.bincount(row_P))[row_P]


def _correlation(before_P: Floats, now_P: Floats, rounding: float) -> float | None:
    if min(np.ptp(before_P), np.ptp(now_P)) <= rounding:
        return None
    return float(np.corrcoef(before_P, now_P)[0, 1])


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an interval of a width needs: the `rows` for each number of samples a row, or the `samples` of the pilot's own rows.

    `narrowest` is the width of these rows with MOST_SAMPLES each. `lacking` says why figures are missing.
    """

    width: float
    rows: dict[int, int] = field(default_factory=dict)
    samples: int | None = None
    narrowest: float | None = None
    lacking: str | None = None


def sizes_for(width: float, pilot: Pairing) -> Sizes:
    """The sizes for a width (high minus low) by the variances of a pilot; never fewer than MIN_ROWS rows."""
    from scipy.special import ndtri

    if pilot.rows < MIN_ROWS:
        return Sizes(width, lacking=f"{counted(pilot.rows, 'row')} with it in both runs; allowed: {MIN_ROWS} or more")
    if not pilot.variance:
        return Sizes(width, lacking="the differences do not vary")
    wanted = (width / (2 * float(ndtri((1 + LEVEL) / 2)))) ** 2  # the variance of the mean that gives the width

    def rows_for(variance_of_row: float) -> int:
        return max(MIN_ROWS, math.ceil(variance_of_row / wanted))

    if pilot.between is None or pilot.within is None:
        rows = {pilot.samples: rows_for(pilot.variance * pilot.rows)}
        return Sizes(width, rows, lacking="needs a pilot with several samples a row, which vary")
    between, within = pilot.between, pilot.within
    left = wanted * pilot.rows - between
    return Sizes(
        width,
        rows={samples: rows_for(between + within / samples) for samples in (1, pilot.samples)},
        samples=math.ceil(within / left) if left * MOST_SAMPLES >= within else None,
        narrowest=width * math.sqrt((between + within / MOST_SAMPLES) / (wanted * pilot.rows)),
    )
