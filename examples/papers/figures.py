"""The figures of the claims, from finished sweeps, by the code of `draftmill compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftmill.jobs.compare.comparison import Comparison, RunFigures, compare_runs, is_binary
from draftmill.jobs.compare.rows import RunRows, read_rows
from draftmill.jobs.compare.runs import FinishedRun, find_runs, open_run
from draftmill.jobs.compare.statistics import Interval, Statistic, grouped_sums, intervals_of, wilson
from draftmill.storage.stores.store import Place


@dataclass(slots=True)
class Results:
    """The finished sweeps under `folder`, one directory a preset; what was read stays in memory."""

    folder: Path
    _runs: dict[tuple[str, str], FinishedRun] = field(default_factory=dict)
    _rows: dict[tuple[str, str], RunRows] = field(default_factory=dict)
    _compared: dict[tuple[str, str, str], tuple[RunFigures, RunFigures, Comparison]] = field(default_factory=dict)

    def cases(self, preset: str) -> list[str]:
        """The names of a preset's finished cases, in the order of its file."""
        return [run.name for run in find_runs([Place(str(self.folder / preset))])[0]]

    def run(self, preset: str, case: str) -> FinishedRun:
        """One finished case."""
        key = (preset, case)
        if key not in self._runs:
            self._runs[key] = open_run(Place(str(self.folder / preset / "cases" / case)))
        return self._runs[key]

    def rows(self, preset: str, case: str) -> RunRows:
        """The rows of one case."""
        key = (preset, case)
        if key not in self._rows:
            self._rows[key] = read_rows(self.run(preset, case))
        return self._rows[key]

    def compared(self, preset: str, baseline: str, case: str) -> tuple[RunFigures, RunFigures, Comparison]:
        """Both cases' own figures, and the comparison of the second with the first, as `draftmill compare` has them."""
        key = (preset, baseline, case)
        if key not in self._compared:
            found = compare_runs([self.run(preset, baseline), self.run(preset, case)])
            first, second = found.runs
            self._compared[key] = (first, second, found.against[0])
        return self._compared[key]


# ---- figures of one claim --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forwards:
    """Forwards per token of a case, as a multiple of the baseline's."""

    preset: str
    baseline: str
    case: str

    def of(self, results: Results) -> Interval:
        """The ratio with its interval over pairs."""
        return results.compared(self.preset, self.baseline, self.case)[2].ratios["nfe_per_token"].ratio

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that it needs."""
        return (self.baseline, self.case)


@dataclass(frozen=True, slots=True)
class SameText(Forwards):
    """The share of samples with the baseline's text, token for token."""

    def of(self, results: Results) -> Interval:
        """The share with its Wilson interval."""
        found = results.compared(self.preset, self.baseline, self.case)[2]
        return wilson(found.equal or 0, found.pairs.num_compared)


@dataclass(frozen=True, slots=True)
class Metric(Forwards):
    """The mean paired difference of a metric, case minus baseline."""

    name: str = ""

    def of(self, results: Results) -> Interval:
        """The difference with its interval over pairs."""
        return results.compared(self.preset, self.baseline, self.case)[2].metrics[self.name].difference


@dataclass(frozen=True, slots=True)
class Ratio:
    """The sum of one column over that of another, over a case's samples; of two cases, the second's over the first's."""

    preset: str
    above: str
    below: str
    case: str
    baseline: str | None = None

    def of(self, results: Results) -> Interval:
        """The rate, or the ratio of two rates, with its interval over samples."""
        mine = (self.case, self.above, self.below)
        if self.baseline is None:
            return rate(*(_column(results.rows(self.preset, self.case), name) for name in (self.above, self.below)))
        return _between(results, self.preset, (self.baseline, self.above, self.below), mine)

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that it needs."""
        return (self.case,) if self.baseline is None else (self.baseline, self.case)


@dataclass(frozen=True, slots=True)
class WithinTokens:
    """The share of samples that took no more forwards than they have tokens."""

    preset: str
    case: str

    def of(self, results: Results) -> Interval:
        """The share with its Wilson interval."""
        rows = results.rows(self.preset, self.case)
        within = rows.counts["nfe"][rows.ok_N] <= rows.counts["new_tokens"][rows.ok_N]
        return wilson(int(within.sum()), len(within))

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that it needs."""
        return (self.case,)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a metric over a case's samples; of zeros and ones a share."""

    preset: str
    case: str
    name: str

    def of(self, results: Results) -> Interval:
        """The mean with its interval over samples (a share: Wilson)."""
        values = results.rows(self.preset, self.case).metrics[self.name]
        known = values[np.isfinite(values)]
        if is_binary(known):
            return wilson(int(known.sum()), len(known))
        return rate(known, np.ones_like(known))

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that it needs."""
        return (self.case,)


Figure = Forwards | Ratio | WithinTokens | Mean


# ---- sums of columns -------------------------------------------------------------------------------------------------


def rate(above_N: NDArray[np.float64], below_N: NDArray[np.float64]) -> Interval:
    """The ratio of two sums over samples, with its interval."""
    return _with_interval([above_N, below_N], lambda sums: sums[..., 0] / sums[..., 1])


def _between(results: Results, preset: str, first: Sequence[str], second: Sequence[str]) -> Interval:
    """The second case's rate over the first's, paired by sample; each is (case, column above, column below)."""
    columns = []
    for case, *names in (first, second):
        rows = results.rows(preset, case)
        columns += [_column(rows, name) for name in names]
    one, other = (results.rows(preset, case).ids for case in (first[0], second[0]))
    if not one.equals(other):
        raise ValueError(f"{preset}: {first[0]} and {second[0]} did not decode the same samples")
    return _with_interval(columns, lambda sums: (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1]))


def _column(rows: RunRows, name: str) -> NDArray[np.float64]:
    values = rows.metrics[name] if name in rows.metrics else rows.counts[name]
    return np.where(rows.ok_N, values, 0).astype(np.float64)


def _with_interval(columns: Sequence[NDArray[np.float64]], statistic: Statistic) -> Interval:
    sums = grouped_sums(columns, np.arange(len(columns[0])))
    return intervals_of(sums, [statistic])[0]
