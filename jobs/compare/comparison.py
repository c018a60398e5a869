"""Compares finished runs with the first of them, sample by sample: texts, effort and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from draftmill.actors.metrics.settings import Better
from draftmill.jobs.compare import statistics
from draftmill.jobs.compare.pairing import Pairing, Pairs, SharedNoise, Sizes, pair, pairing_of, shared_noise, sizes_for
from draftmill.jobs.compare.rows import By, RunRows, read_rows
from draftmill.jobs.compare.runs import FinishedRun, check_same_work, same_tokenizer
from draftmill.jobs.compare.statistics import Floats, Interval, Statistic
from draftmill.storage.errors import UserError

Verdict = Literal["higher", "lower", "equal", "not distinguishable"]
Test = Literal["McNemar", "sign flips"]


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
    """A figure of a run divided by the baseline's, over all pairs. `better` says which values are better."""

    baseline: float
    run: float
    ratio: Interval
    verdict: Verdict
    better: Better | None


@dataclass(frozen=True, slots=True)
class MetricFigure:
    """A metric over the `pairs` that have it in both runs: both means, and the mean of run minus baseline.

    `better` says which values are better, None if that is not known. `only_baseline` and `only_run` count, for a metric of
    zeros and ones, the pairs in which it is 1 in one run only. `sizes` are those for an interval of a wanted width.
    """

    pairs: int
    baseline: float
    run: float
    difference: Interval
    test: Test
    p: float
    verdict: Verdict
    pairing: Pairing
    better: Better | None = None
    only_baseline: int | None = None
    only_run: int | None = None
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against its baseline. `equal` counts pairs with equal tokens (or texts, see `equal_by`); None for scored texts."""

    run: str
    baseline: str
    pairs: Pairs
    noise: SharedNoise
    equal: int | None
    equal_by: By
    ratios: dict[str, RatioFigure]
    metrics: dict[str, MetricFigure]


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Several runs, and each of them against its baseline, if it has one."""

    runs: tuple[RunFigures, ...]
    against: tuple[Comparison, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def baselines(self) -> list[str]:
        """The runs with which others are compared, in order."""
        return list(dict.fromkeys(comparison.baseline for comparison in self.against))


def compare_runs(
    runs: Sequence[FinishedRun],
    *,
    unfinished: Sequence[str] = (),
    baseline: str | None = None,
    width: float | None = None,
) -> Comparisons:
    """Compare each run with its baseline (see `baselines_of`); two runs in memory at a time. With a `width`, plan each metric's
    interval of this width.

    Raises UserError, before any row is read, where a run decoded something else, and where no pair is left or no metric can be
    planned.
    """
    baselines = baselines_of(runs, baseline)
    if len(runs) < 2:
        missing = f"; not finished: {', '.join(unfinished)}" if unfinished else ""
        raise UserError(f"{len(runs)} finished run to compare{missing}; allowed: two or more")
    first, *others = runs
    for run in others:
        check_same_work(first.name, first.plan, run.name, run.plan)
    by: By = "tokens" if all(same_tokenizer(first.plan, run.plan) for run in others) else "text"
    figures: dict[int, RunFigures] = {}
    against: dict[int, Comparison] = {}
    for place in dict.fromkeys(baselines):  # each baseline once, with all that are compared with it
        rows = read_rows(runs[place], by=by)
        figures[place] = figures_of(runs[place], rows)
        for number in [number for number, own in enumerate(baselines) if own == place != number]:
            others_rows = read_rows(runs[number], by=by)
            figures[number] = figures_of(runs[number], others_rows)
            against[number] = compare_rows(runs[place], rows, runs[number], others_rows, by)
    in_order = tuple(figures[number] for number in sorted(figures))
    compared = [against[number] for number in sorted(against)]
    if width is not None:
        compared = [with_sizes(comparison, width) for comparison in compared]
    return Comparisons(in_order, tuple(compared), tuple(unfinished))


def with_sizes(comparison: Comparison, width: float) -> Comparison:
    """The comparison with the sizes that intervals of a width need; UserError if no metric has any."""
    if not 0 < width < math.inf:
        raise UserError(f"{width} is not the width of an interval; allowed: a number above 0", field="--plan")
    metrics = {name: replace(one, sizes=sizes_for(width, one.pairing)) for name, one in comparison.metrics.items()}
    if not any(one.sizes.rows for one in metrics.values() if one.sizes is not None):
        of_each = [f"{name}: {one.sizes.lacking}" for name, one in metrics.items() if one.sizes is not None]
        why = "; ".join(of_each) or "no metric has numbers in both runs; draftmill measure computes them"
        raise UserError(f"{comparison.run} against {comparison.baseline} is no pilot: {why}", field="--plan")
    return replace(comparison, metrics=metrics)


def baselines_of(runs: Sequence[FinishedRun], baseline: str | None) -> list[int]:
    """The place of each run's baseline among `runs`, its own if it has none.

    With a `baseline` (a name, a short name or a directory) it is that run for all. A case of a sweep
    that differs from the first one in several settings is compared with the first case from which it differs in one, in the
    decoder if there is such a case: a grid's decoders are compared at the same temperature. All others: with the first.
    """
    if baseline is not None:
        names = [{run.name, run.short, run.store.url.rstrip("/")} for run in runs]
        place = next((number for number, own in enumerate(names) if baseline.rstrip("/") in own), None)
        if place is None:
            allowed = ", ".join(run.name for run in runs)
            raise UserError(f"{baseline!r} is none of the finished runs; allowed: {allowed}", field="--baseline")
        return [place] * len(runs)
    if not all(run.short for run in runs):
        return [0] * len(runs)
    settings = [_settings(run) for run in runs]
    return [_nearest(settings, number) for number in range(len(runs))]


def _nearest(settings: Sequence[dict[str, Any]], number: int) -> int:
    own = settings[number]
    apart = [{key for key in own.keys() | of.keys() if own.get(key) != of.get(key)} for of in settings[:number]]
    if number == 0 or len(apart[0]) <= 1:
        return 0
    by_decoder = [place for place, keys in enumerate(apart) if keys == {"decoder"}]
    by_one_key = [place for place, keys in enumerate(apart) if len(keys) == 1]
    return [*by_decoder, *by_one_key, 0][0]


def _settings(run: FinishedRun) -> dict[str, Any]:
    """What may differ between cases, by the key of the spec; decoder and model count as one setting each."""
    settings: dict[str, Any] = {}
    for section, value in run.plan.spec.results_key().items():
        is_one = section in {"decoder", "model"} or not isinstance(value, dict)
        settings |= {section: value} if is_one else {f"{section}.{key}": inner for key, inner in value.items()}
    return settings


def figures_of(run: FinishedRun, rows: RunRows) -> RunFigures:
    """The figures of one run, over its ok samples."""
    sums = {name: int(column[rows.ok_N].sum(dtype=np.int64)) for name, column in rows.counts.items()}
    tokens = sums["new_tokens"]
    return RunFigures(
        name=run.name,
        place=run.store.url,
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
        raise UserError(f"{run.store.url} and {first.store.url} have no sample in common: no id is in both")
    equal = int((baseline.digest_N[pairs.first_P] == rows.digest_N[pairs.second_P]).sum())
    figures = {name: _metric_figure(name, pairs, baseline, rows) for name in baseline.metrics if name in rows.metrics}
    metrics = {name: figure for name, figure in figures.items() if figure is not None}
    scored = first.plan.spec.task.kind == "score"
    noise = shared_noise(first, baseline, run, rows, pairs)
    return Comparison(
        run.name, first.name, pairs, noise, None if scored else equal, by, _ratios(pairs, baseline, rows), metrics
    )


def _ratios(pairs: Pairs, baseline: RunRows, rows: RunRows) -> dict[str, RatioFigure]:
    """All ratios that are defined, such as none to 0."""
    columns: list[Floats] = []
    for run, place in ((baseline, pairs.first_P), (rows, pairs.second_P)):
        columns += [run.counts[name][place].astype(np.float64) for name in ("nfe", "nfe_draft", "new_tokens")]
        columns.append(run.device_s_N[place])
    sums_GS = statistics.grouped_sums(columns, pairs.row_P)
    intervals, total = statistics.intervals_of(sums_GS, [*map(_ratio, _FIGURES.values())]), sums_GS.sum(axis=0)
    return {
        name: RatioFigure(
            baseline=float(figure(total)),
            run=float(figure(total[4:])),
            ratio=interval,
            verdict=verdict(interval, 1.0),
            better=None if name == "tokens" else "lower",
        )
        for (name, figure), interval in zip(_FIGURES.items(), intervals, strict=True)
        if np.isfinite(interval.value)
    }


_FIGURES: Final[dict[str, Statistic]] = {
    "nfe": lambda sums: sums[..., 0],
    "nfe_draft": lambda sums: sums[..., 1],
    "tokens": lambda sums: sums[..., 2],
    "nfe_per_token": lambda sums: sums[..., 0] / _divisor(sums[..., 2]),
    "device_s_per_token": lambda sums: sums[..., 3] / _divisor(sums[..., 2]),
}
"""From the sums of one run; those of the second run are 4 places further."""


def _divisor(sums: Floats) -> Floats:
    return np.where(sums == 0, np.nan, sums)


def _ratio(figure: Statistic) -> Statistic:
    return lambda sums: figure(sums[..., 4:]) / figure(sums)


def verdict(interval: Interval, null: float, p: float = 0.0) -> Verdict:
    """What a figure says; `null` is its value for equal runs. "not distinguishable" if the interval or the test says so."""
    if interval.value == null and interval.low == interval.high == null:
        return "equal"
    if p >= statistics.ALPHA or interval.holds(null):
        return "not distinguishable"
    return "higher" if interval.value > null else "lower"


def _metric_figure(name: str, pairs: Pairs, baseline: RunRows, rows: RunRows) -> MetricFigure | None:
    """The figure of a metric; None where no pair has it."""
    before, now = baseline.metrics[name][pairs.first_P], rows.metrics[name][pairs.second_P]
    sums_GS = statistics.grouped_sums(statistics.finite_values(now - before), pairs.row_P)
    valid = np.isfinite(before) & np.isfinite(now)
    if not valid.any():
        return None
    [interval] = statistics.intervals_of(sums_GS, [statistics.quotient(0)])
    before, now, row_P = before[valid], now[valid], pairs.row_P[valid]
    facts: dict[str, Any] = {}
    if is_binary(before) and is_binary(now):
        facts = {"only_baseline": int((before > now).sum()), "only_run": int((now > before).sum())}
    if facts and len(np.unique(row_P)) == len(row_P):
        test: Test = "McNemar"
        p = statistics.mcnemar_p(facts["only_baseline"], facts["only_run"])
    else:
        test, p = "sign flips", statistics.sign_flip_p(sums_GS[:, 0])
    equal = bool((before == now).all())
    return MetricFigure(
        pairs=len(before),
        baseline=float(before.mean()),
        run=float(now.mean()),
        difference=interval,
        test=test,
        p=p,
        verdict="equal" if equal else verdict(interval, 0.0, p),
        pairing=pairing_of(before, now, row_P, interval),
        better=rows.better.get(name),
        **facts,
    )


def is_binary(values: Floats) -> bool:
    return bool(np.isin(values, (0, 1)).all())


def _share(above: float, below: float) -> float | None:
    return above / below if below else None
