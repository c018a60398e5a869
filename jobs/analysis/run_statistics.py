"""Everything that a report shows of one run: sums, histograms, curves over time, and a bounded number of points."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.actors.metrics.settings import Better
from draftmill.jobs.analysis.comparison import RunFigures, figures_of, sums_of
from draftmill.jobs.analysis.rows import RunRows, numbers, read_rows, row_numbers
from draftmill.jobs.analysis.runs import FinishedRun
from draftmill.jobs.analysis.statistics import Interval, bootstrap, finite_values, grouped_sums, quotient, wilson
from draftmill.jobs.driving.cost import DeviceSums
from draftmill.jobs.driving.run_log import Sessions, read_sessions
from draftmill.jobs.finished.passes import latest_rows

POINTS: Final = 50_000
"""The largest number of samples that the plots of points use; a larger run gives every k-th of its samples."""

TIME_BINS: Final = 120
"""The most bins of a plot over time; runs of few samples have fewer. A multiple of 24, or 12, so that plots can join bins."""

GAP_S: Final = 30.0
"""A pause between samples longer than this, and than a twentieth of the time before it, is cut out of plots over time."""

DETAILS: Final = (
    "id", "status", "error_kind", "error", "accept_hist", "worker", "started_at", "wait_s", "prefill_s", "decode_s",
)  # fmt: skip
"""Columns that only a report reads, beside those of RunRows."""

WIDE: Final = 100.0
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True)
class Course:
    """The run over time, in equal bins: tokens per second, each sample's spread evenly over its time in a slot, and samples in a
    slot on average.

    Times are seconds of decoding since the first sample got a slot, without pauses; `resumed_s` are the ends of pauses.
    """

    edges_s: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    active: NDArray[np.float64]
    resumed_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram, the QUANTILES and the mean. Where values differ by more than WIDE, bins grow by a constant factor (`log`);
    then zeros are counted apart, in `num_zero`.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    num_zero: int
    log: bool
    quantiles: tuple[float, ...]
    mean: float


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """One run as a report shows it. `new_tokens_M` and `nfe_M` are those of one ok sample in `every`; `sums` are over all."""

    run: FinishedRun
    figures: RunFigures
    metrics: dict[str, Interval]
    metric_rows: dict[str, int]
    better: dict[str, Better | None]
    accept_hist: NDArray[np.int64]
    new_tokens_M: NDArray[np.int32]
    nfe_M: NDArray[np.int32]
    every: int
    course: Course | None
    spreads: dict[str, Spread]
    errors: dict[str, int]
    examples: dict[str, tuple[str, str]]
    sums: dict[str, int]
    workers: int
    started: str | None
    ended: str | None
    sessions: Sessions
    spent: DeviceSums


def read_statistics(run: FinishedRun) -> RunStatistics:
    """Read a run and reduce it; about 100 bytes a sample are in memory meanwhile."""
    rows = read_rows(run)
    ok = rows.ok_N
    every = max(1, -(-int(ok.sum()) // POINTS))
    histogram = np.zeros(0, np.int64)
    errors: Counter[str] = Counter()
    examples: dict[str, tuple[str, str]] = {}
    workers: set[str] = set()
    parts: list[tuple[NDArray[np.float64], ...]] = []
    for table in latest_rows(run.passes, columns=DETAILS):
        good = table.filter(pc.equal(table["status"], "ok"))
        histogram = _add_histograms(histogram, good["accept_hist"])
        workers.update(pc.unique(table["worker"].cast(pa.string())).drop_null().to_pylist())
        failed = table.filter(pc.equal(table["status"], "failed")).select(["error_kind", "id", "error"])
        for row in failed.to_pylist():
            kind = row["error_kind"] or "unknown"
            errors[kind] += 1
            examples.setdefault(kind, (row["id"], row["error"] or ""))
        parts.append(_times(table))
    start_N, wait_N, resident_N = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    timed = ok & (start_N > 0)
    start, resident = start_N[timed], resident_N[timed]
    return RunStatistics(
        run=run,
        figures=figures_of(run, rows),
        metrics=metric_intervals(rows),
        metric_rows={name: int(np.isfinite(column).sum()) for name, column in rows.metrics.items()},
        better=rows.better,
        accept_hist=histogram,
        new_tokens_M=rows.counts["new_tokens"][ok][::every],
        nfe_M=rows.counts["nfe"][ok][::every],
        every=every,
        course=course_of(start, start + resident, rows.counts["new_tokens"][timed]),
        spreads={
            "wait_s": spread_of(wait_N[ok]),
            "resident_s": spread_of(resident_N[ok]),
            "device_s": spread_of(rows.device_s_N[ok]),
        },
        errors=dict(sorted(errors.items(), key=lambda item: (-item[1], item[0]))),
        examples=examples,
        sums=sums_of(rows),
        workers=len(workers),
        started=_moment(start.min()) if len(start) else None,
        ended=_moment((start + resident).max()) if len(start) else None,
        sessions=read_sessions(run.store),
        spent=sum((read_sessions(pass_.store).devices for pass_ in run.passes), DeviceSums()),
    )


def metric_intervals(rows: RunRows) -> dict[str, Interval]:
    """The mean of each metric with its interval: Wilson's for a proportion over rows with one sample, else the bootstrap's."""
    names = list(rows.metrics)
    row_N = row_numbers(rows.ids, rows.ids)
    if not names:
        return {}
    sums_GS = grouped_sums((column_N for name in names for column_N in finite_values(rows.metrics[name])), row_N)
    intervals = bootstrap(sums_GS, [quotient(2 * number) for number in range(len(names))])
    single = row_N.max(initial=-1) + 1 == len(row_N)
    means = {}
    for name, mean in zip(names, intervals, strict=True):
        values = rows.metrics[name][np.isfinite(rows.metrics[name])]
        means[name] = wilson(int(values.sum()), len(values)) if single and name in rows.proportions else mean
    return means


def _times(table: pa.Table) -> tuple[NDArray[np.float64], ...]:
    start = table["started_at"].cast(pa.int64()).fill_null(0).to_numpy() / 1e6
    resident = numbers(table, "prefill_s", np.float64) + numbers(table, "decode_s", np.float64)
    return start, numbers(table, "wait_s", np.float64), resident


def _add_histograms(histogram: NDArray[np.int64], column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The histogram plus those of a column's rows."""
    flat = pc.list_flatten(column).to_numpy()
    lengths = pc.list_value_length(column.drop_null()).to_numpy()
    place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sums = np.bincount(place, weights=flat).astype(np.int64)
    size = max(len(histogram), len(sums))
    return np.pad(histogram, (0, size - len(histogram))) + np.pad(sums, (0, size - len(sums)))


def at_least(accept_hist: NDArray[np.int64]) -> NDArray[np.float64]:
    """Entry j - 1: the share of iterations that committed at least j tokens, j = 1 ..; without the zeros at the end."""
    total = accept_hist.sum()
    if not total:
        return np.zeros(0)
    shares = accept_hist[::-1].cumsum()[::-1][1:] / total
    return np.asarray(shares[shares > 0], np.float64)


def course_of(start_N: NDArray[np.float64], end_N: NDArray[np.float64], tokens_N: NDArray[np.int32]) -> Course | None:
    """The run over time from each sample's first and last moment in a slot, in seconds; None without samples."""
    bins = 12 if len(start_N) < 200 else 24 * int(np.clip(len(start_N) // 200, 1, TIME_BINS // 24))
    if not len(start_N):
        return None
    order = np.argsort(start_N, kind="stable")
    start, end, tokens = start_N[order], end_N[order], tokens_N[order].astype(np.float64)
    origin = start[0]
    reached = np.maximum.accumulate(end)
    pause = np.maximum(start[1:] - reached[:-1], 0.0)
    cut = np.where(pause > np.maximum(GAP_S, (reached[:-1] - origin) / 20), pause, 0.0)
    shift = np.concatenate([[0.0], np.cumsum(cut)]) + origin
    start, end = start - shift, end - shift
    last = float(end.max())
    if last <= 0:
        return None
    edges = np.linspace(0.0, last, bins + 1)
    width = edges[1]
    occupied = _time_before(edges, start) - _time_before(edges, end)
    first = np.minimum(start, np.maximum(end - width / 1000, 0.0))  # also for samples that took no time at all
    until = np.maximum(end, first + width / 1000)
    rate = tokens / (until - first)
    generated = _time_before(edges, first, rate) - _time_before(edges, until, rate)
    resumed = tuple(float(value) for value in start[1:][cut > 0])
    return Course(edges, np.diff(generated) / width, np.diff(occupied) / width, resumed)


def _time_before(
    edges: NDArray[np.float64], moments: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """For each edge, the weighted sum over moments before it of the time since the moment: its differences count samples times
    seconds, or with a rate as the weight what came of them.
    """
    order = np.argsort(moments, kind="stable")
    moments, weights = moments[order], (np.ones(len(moments)) if weights is None else weights[order])
    sums = np.concatenate([[0.0], np.cumsum(moments * weights)])
    totals = np.concatenate([[0.0], np.cumsum(weights)])
    count = np.searchsorted(moments, edges)
    return np.asarray(totals[count] * edges - sums[count])


def spread_of(values: NDArray[Any]) -> Spread:
    """The histogram of values of at least 0, in 10 to 40 bins."""
    quantiles = tuple(float(value) for value in np.quantile(values if len(values) else [0.0], QUANTILES))
    mean = float(np.mean(values)) if len(values) else 0.0
    positive = np.asarray(values[values > 0], np.float64)
    if not len(positive):
        return Spread(np.zeros(0), np.zeros(0, np.int64), len(values), False, quantiles, mean)
    low, high = float(positive.min()), float(positive.max())
    bins = int(np.clip(2 * np.sqrt(len(values)), 10, 40))
    if high > WIDE * low:
        edges = np.geomspace(low * 0.999, high * 1.001, bins + 1)
        counts = np.histogram(positive, edges)[0].astype(np.int64)
        return Spread(edges, counts, len(values) - len(positive), True, quantiles, mean)
    if np.issubdtype(values.dtype, np.integer):  # bins of whole numbers, each with equally many
        step = max(1, -(-int(high + 1) // bins))
        edges = np.arange(0, high + 1 + step, step) - 0.5
    else:
        edges = np.linspace(0.0, high, bins + 1)
    return Spread(edges, np.histogram(values, edges)[0].astype(np.int64), 0, False, quantiles, mean)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
