"""Compares finished runs with the first of them, sample by sample: texts, effort and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from draftmill.jobs.analysis.pairing import Pairs, pair
from draftmill.jobs.analysis.rows import By, RunRows, read_rows
from draftmill.jobs.analysis.runs import FinishedRun
from draftmill.jobs.analysis.same_work import check_same_work, same_tokenizer
from draftmill.jobs.analysis.statistics import (
    ALPHA,
    Floats,
    Interval,
    Statistic,
    bootstrap,
    grouped_sums,
    mcnemar_p,
    sign_flip_p,
)
from draftmill.storage.errors import UserError

Verdict = Literal["higher", "lower", "equal", "not distinguishable"]
Test = Literal["McNemar", "sign flips"]

RATIOS: Final = ("nfe", "nfe_draft", "tokens", "nfe_per_token", "device_s_per_token")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Sums and means over the ok samples of one run; a figure that can't be computed is None."""

    name: str
    place: str
    fingerprint: str
    decoder: str
    model: str
    samples: int
    failed: int
    tokens: int
    nfe_per_token: float | None
    nfe_draft_per_token: float | None
    device_s_per_token: float | None
    tokens_per_iteration: float | None
    acceptance: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class RatioFigure:
    """A figure of a run divided by the baseline's, over all pairs."""

    baseline: float
    run: float
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class MetricFigure:
    """A metric over the `pairs` that have it in both runs: both means, and the mean of run minus baseline.

    `only_baseline` and `only_run` count, for a metric of zeros and ones, the pairs in which it is 1 in one run only.
    """

    pairs: int
    baseline: float
    run: float
    difference: Interval
    test: Test
    p: float
    verdict: Verdict
    only_baseline: int | None = None
    only_run: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against the baseline. `equal` counts pairs with equal tokens (or texts, see `equal_by`); None for scored texts."""

    run: str
    pairs: Pairs
    equal: int | None
    equal_by: By
    ratios: dict[str, RatioFigure]
    metrics: dict[str, MetricFigure]


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Several runs, the first of which is the baseline of the others."""

    runs: tuple[RunFigures, ...]
    against: tuple[Comparison, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def baseline(self) -> str:
        """The name of the first run."""
        return self.runs[0].name


def compare_runs(runs: Sequence[FinishedRun], *, unfinished: Sequence[str] = ()) -> Comparisons:
    """Compare each run with the first one; two runs in memory at a time.

    Raises UserError, before any row is read, where a run decoded something else, and where no pair is left.
    """
    if len(runs) < 2:
        missing = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        raise UserError(f"{len(runs)} finished run to compare{missing}; allowed: two or more")
    first, *others = runs
    for run in others:
        check_same_work(first.name, first.plan, run.name, run.plan)
    by: By = "tokens" if all(same_tokenizer(first.plan, run.plan) for run in others) else "text"
    baseline = read_rows(first, by=by)
    figures, found = [figures_of(first, baseline)], []
    for run in others:
        rows = read_rows(run, by=by)
        figures.append(figures_of(run, rows))
        found.append(compare_rows(first, baseline, run, rows, by))
    return Comparisons(tuple(figures), tuple(found), tuple(unfinished))


def figures_of(run: FinishedRun, rows: RunRows) -> RunFigures:
    """The figures of one run, over its ok samples."""
    sums = {name: int(column[rows.ok_N].sum(dtype=np.int64)) for name, column in rows.counts.items()}
    tokens = sums["new_tokens"]
    return RunFigures(
        name=run.name,
        place=run.place,
        fingerprint=run.plan.fingerprint,
        decoder=run.plan.spec.decoder.kind,
        model=run.plan.spec.model.path,
        samples=rows.num_rows,
        failed=int((~rows.ok_N).sum()),
        tokens=tokens,
        nfe_per_token=_share(sums["nfe"], tokens),
        nfe_draft_per_token=_share(sums["nfe_draft"], tokens),
        device_s_per_token=_share(float(rows.device_s_N[rows.ok_N].sum()), tokens),
        tokens_per_iteration=_share(tokens, sums["iterations"]),
        acceptance=_share(sums["accepted"], sums["proposed"]),
        metrics={name: float(np.nanmean(column)) for name, column in rows.metrics.items()},
    )


def compare_rows(first: FinishedRun, baseline: RunRows, run: FinishedRun, rows: RunRows, by: By) -> Comparison:
    """One run against the baseline."""
    pairs = pair(baseline, rows)
    if not pairs.both:
        raise UserError(f"{run.place} and {first.place} have no sample in common: no id is in both")
    equal = int((baseline.digest_N[pairs.first_P] == rows.digest_N[pairs.second_P]).sum())
    ratios, metrics = _figures(pairs, baseline, rows)
    scored = first.plan.spec.task.kind == "score"
    return Comparison(run.name, pairs, None if scored else equal, by, ratios, metrics)


def _figures(pairs: Pairs, baseline: RunRows, rows: RunRows) -> tuple[dict[str, RatioFigure], dict[str, MetricFigure]]:
    """All ratios and differences, from one set of resamples; without those that are not defined, such as ratios to 0."""
    names = [name for name in baseline.metrics if name in rows.metrics]
    sums_GS = grouped_sums(_columns(pairs, baseline, rows, names), pairs.row_P)
    statistics = [_ratio(*places) for places in _PLACES.values()]
    statistics += [_mean(8 + 2 * number) for number in range(len(names))]
    intervals = bootstrap(sums_GS, statistics)
    ratios = {
        name: _ratio_figure(sums_GS.sum(axis=0), _PLACES[name], interval)
        for name, interval in zip(RATIOS, intervals, strict=False)
        if np.isfinite(interval.value)
    }
    metrics = {
        name: _metric_figure(pairs, baseline.metrics[name], rows.metrics[name], interval, sums_GS[:, 8 + 2 * number])
        for number, (name, interval) in enumerate(zip(names, intervals[len(RATIOS) :], strict=True))
        if sums_GS[:, 9 + 2 * number].any()
    }
    return ratios, metrics


def _columns(pairs: Pairs, baseline: RunRows, rows: RunRows, names: Sequence[str]) -> Iterator[Floats]:
    """The values to sum, one column at a time: four of each run, then difference and validity of each metric."""
    for one, place in ((baseline, pairs.first_P), (rows, pairs.second_P)):
        for name in ("nfe", "nfe_draft", "new_tokens"):
            yield one.counts[name][place].astype(np.float64)
        yield one.device_s_N[place]
    for name in names:
        difference = rows.metrics[name][pairs.second_P] - baseline.metrics[name][pairs.first_P]
        valid = np.isfinite(difference)
        yield np.where(valid, difference, 0.0)
        yield valid.astype(np.float64)


_PLACES: Final[dict[str, tuple[int, int | None]]] = {
    "nfe": (0, None),
    "nfe_draft": (1, None),
    "tokens": (2, None),
    "nfe_per_token": (0, 2),
    "device_s_per_token": (3, 2),
}
"""Numerator and denominator of each ratio's figure among the sums of one run; the second run's sums are 4 places further."""


def _figure(sums: Floats, above: int, below: int | None) -> Floats:
    """One sum, or a quotient of two; NaN where the divisor is 0."""
    if below is None:
        return np.asarray(sums[..., above])
    divisor = np.asarray(sums[..., below])
    return np.asarray(sums[..., above] / np.where(divisor == 0, np.nan, divisor))


def _ratio(above: int, below: int | None) -> Statistic:
    return lambda sums: _figure(sums, above + 4, None if below is None else below + 4) / _figure(sums, above, below)


def _mean(place: int) -> Statistic:
    return lambda sums: sums[..., place] / sums[..., place + 1]


def _ratio_figure(sums: Floats, places: tuple[int, int | None], ratio: Interval) -> RatioFigure:
    above, below = places
    baseline = float(_figure(sums, above, below))
    run = float(_figure(sums, above + 4, None if below is None else below + 4))
    return RatioFigure(baseline, run, ratio, verdict(ratio, 1.0))


def verdict(interval: Interval, null: float, p: float = 0.0) -> Verdict:
    """What a figure says; `null` is its value for equal runs. "not distinguishable" if the interval or the test says so."""
    if interval.value == null and interval.low == interval.high == null:
        return "equal"
    if p >= ALPHA or interval.holds(null):
        return "not distinguishable"
    return "higher" if interval.value > null else "lower"


def _metric_figure(
    pairs: Pairs, before_N: Floats, now_N: Floats, interval: Interval, difference_G: Floats
) -> MetricFigure:
    before, now = before_N[pairs.first_P], now_N[pairs.second_P]
    valid = np.isfinite(before) & np.isfinite(now)
    before, now = before[valid], now[valid]
    facts: dict[str, Any] = {}
    if is_binary(before) and is_binary(now):
        facts = {"only_baseline": int((before > now).sum()), "only_run": int((now > before).sum())}
    if facts and len(np.unique(pairs.row_P[valid])) == len(before):
        test: Test = "McNemar"
        p = mcnemar_p(facts["only_baseline"], facts["only_run"])
    else:
        test, p = "sign flips", sign_flip_p(difference_G)
    equal = bool((before == now).all())
    return MetricFigure(
        pairs=len(before),
        baseline=float(before.mean()),
        run=float(now.mean()),
        difference=interval,
        test=test,
        p=p,
        verdict="equal" if equal else verdict(interval, 0.0, p),
        **facts,
    )


def is_binary(values: NDArray[np.float64]) -> bool:
    """Whether a metric has zeros and ones only."""
    return bool(((values == 0) | (values == 1)).all())


def _share(above: float, below: float) -> float | None:
    return above / below if below else None
