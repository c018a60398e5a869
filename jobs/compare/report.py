"""`draftmill report`: one HTML file about a finished run, or about the cases of a sweep: tables, and four plots.

    quality         what each metric costs in forwards and in device time: a point per case
    acceptance      how many tokens an iteration commits
    length          forwards against the length of a sample
    throughput      tokens per second, and samples in a slot, over time

The page is page.html.j2, beside this file, which `show --html` fills, too. Here are its figures.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import BaseModel

from draftmill.actors.metrics.settings import Better
from draftmill.jobs.compare.compare import comparison_tables, heading, notes, number, remarks, runs_table
from draftmill.jobs.compare.comparison import Comparisons, RunFigures, baselines_of, compare_runs, figures_of
from draftmill.jobs.compare.rows import RunRows, numbers, read_rows, row_numbers
from draftmill.jobs.compare.runs import FinishedRun, check_same_work, find_runs
from draftmill.jobs.compare.statistics import (
    LEVEL,
    Interval,
    finite_values,
    grouped_sums,
    intervals_of,
    quotient,
    wilson,
)
from draftmill.jobs.config.sweep_spec import RECORD
from draftmill.jobs.drive.run_log import Sessions, read_sessions
from draftmill.jobs.drive.totals import PURPOSES, DeviceSums, device_time_rows, exactness, hours_text, purposes_of
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import flat
from draftmill.jobs.results.export import open_whole
from draftmill.jobs.results.passes import latest_rows
from draftmill.jobs.results.summary import machine_rows, sample_rows, sums_of
from draftmill.storage.errors import UserError, printable
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.records import Sums, brief_line
from draftmill.storage.stores.store import Place, is_local, open_store

MADE_BY: Final = '<meta name="generator" content="draftmill'
"""How a page of ours is recognized, to be replaced by a newer one."""


def report(place: Place, out: str, *, baseline: str | None = None, overwrite: bool = False) -> int:
    """Write the report on `place` to the local file `out`, whole or not at all; returns the exit code.

    `baseline` is the case with which the others are compared. An earlier report is replaced. UserError if there is no finished
    run, or if the file exists and is something else.
    """
    print(f"{out}: {write_page(out, lambda: report_page(place, baseline), overwrite=overwrite):,} bytes")
    return OK


def write_page(out: str, page: Callable[[], str], *, field: str = "--out", overwrite: bool = False) -> int:
    """Write a page to the local file `out`, whole or not at all; returns its bytes. An earlier page of ours is replaced.

    UserError for `field`, before the page is made, if the file can't be written, or exists and is something else.
    """
    target = Path(os.path.expanduser(out))
    if not is_local(out):
        raise UserError(f"{out!r} is not a local file", field=field)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"{out!r} is a folder, or in a folder that does not exist; allowed: a file", field=field)
    if target.exists() and not overwrite:
        with target.open("rb") as file:
            if MADE_BY.encode() not in file.read(1000):
                raise UserError(f"{out!r} exists and is not a page of draftmill; --overwrite replaces it", field=field)
    content = page().encode()
    with open_whole(Place(out), field=field, overwrite=True) as file:
        file.write(content)
    return len(content)


def report_page(place: Place, baseline: str | None) -> str:
    """The page of a run, or of a sweep's cases with their short names; UserError without a run, or one named `baseline`."""
    runs, unfinished = find_runs([place])
    if not runs:
        raise UserError(f"no finished run to report on; not finished: {', '.join(unfinished)}")
    is_sweep = open_store(place).exists(RECORD)
    title = f"Sweep: {place.url.rstrip('/').rpartition('/')[2]}" if is_sweep else f"Run: {runs[0].plan.spec.name}"
    named = [replace(run, name=run.short or run.name) for run in runs]
    name = None
    if baseline is not None and len(named) > 1:
        name = named[baselines_of(runs, baseline)[0]].name
    compared = comparisons_of(named, name)
    cases = [read_statistics(run) for run in named]
    sections = [section for section in _sections(cases, compared) if section["parts"]]
    versions = ", ".join(sorted({run.plan.code_version for run in runs}))
    foot = f"Made by draftmill report from the files of the run alone (version {versions}). Figures are counted or measured."
    return render_page(title=title, lead=_lead(cases, unfinished), sections=sections, foot=foot, rows=None, last=0)


def render_page(**content: Any) -> str:
    """Fill the template; all values are escaped, and control characters are spelled out."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    return environment.get_template("page.html.j2").render(**content)


# ---- the figures of a run

TIME_BINS: Final = 24
GAP_S: Final = 30.0
"""A pause between samples longer than this, and than a twentieth of the time before it, is cut out of the time."""

LENGTHS: Final = 24
"""Bins of new tokens in the plot of forwards against length."""

QUANTILES: Final = (0.5, 0.95)
DETAILS: Final = ("status", "accept_hist", "worker", "started_at", "wait_s", "prefill_s", "decode_s")
"""Columns that only a report reads, beside those of RunRows."""

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The x and y of points that a line joins."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """One run as a report shows it. `nfe_by_length` has means; `rates` and `active` are tokens per second and samples in a slot
    over time; `times` has the QUANTILES of the seconds of a sample, by what they are.
    """

    run: FinishedRun
    figures: RunFigures
    metrics: dict[str, Interval]
    metric_rows: dict[str, int]
    better: dict[str, Better | None]
    accept_hist: NDArray[np.int64]
    nfe_by_length: Curve
    rates: Curve
    active: Curve
    times: dict[str, NDArray[np.float64]]
    sums: Sums
    workers: int
    period: str | None
    sessions: Sessions
    spent: DeviceSums


def read_statistics(run: FinishedRun) -> RunStatistics:
    """Read a run and reduce it; about 100 bytes a sample are in memory meanwhile."""
    rows = read_rows(run)
    ok = rows.ok_N
    histogram = np.zeros(0, np.int64)
    workers: set[str] = set()
    parts: list[tuple[NDArray[np.float64], ...]] = []
    for table in latest_rows(run.passes, columns=DETAILS):
        histogram = add_histograms(histogram, table.filter(pc.equal(table["status"], "ok"))["accept_hist"])
        workers.update(pc.unique(table["worker"].cast(pa.string())).drop_null().to_pylist())
        start = table["started_at"].cast(pa.int64()).fill_null(0).to_numpy() / 1e6
        resident = numbers(table, "prefill_s", np.float64) + numbers(table, "decode_s", np.float64)
        parts.append((start, numbers(table, "wait_s", np.float64), resident))
    start_N, wait_N, resident_N = map(np.concatenate, zip(*parts, strict=True))
    timed = ok & (start_N > 0)
    start, end, tokens_N = start_N[timed], (start_N + resident_N)[timed], rows.counts["new_tokens"]
    times = {"wait for a slot": wait_N, "time in a slot": resident_N, "device time": rows.device_s_N}
    rates, active = courses_of(start, end, tokens_N[timed])
    return RunStatistics(
        run=run,
        figures=figures_of(run, rows),
        metrics=metric_intervals(rows),
        metric_rows={name: int(np.isfinite(column).sum()) for name, column in rows.metrics.items()},
        better=rows.better,
        accept_hist=histogram,
        nfe_by_length=by_length(tokens_N[ok], rows.counts["nfe"][ok]),
        rates=rates,
        active=active,
        times={name: np.quantile(values[ok], QUANTILES) for name, values in times.items() if values[ok].any()},
        sums=sums_of(run.passes),
        workers=len(workers),
        period=f"{_moment(start.min())} to {_moment(end.max())}" if len(start) else None,
        sessions=read_sessions(run.store),
        spent=sum((read_sessions(pass_.store).devices for pass_ in run.passes), DeviceSums()),
    )


def metric_intervals(rows: RunRows) -> dict[str, Interval]:
    """The mean of each metric with its interval: Wilson's for a proportion over rows with one sample, else Student's t."""
    names = list(rows.metrics)
    row_N = row_numbers(rows.ids, rows.ids)
    if not names:
        return {}
    sums_GS = grouped_sums((column_N for name in names for column_N in finite_values(rows.metrics[name])), row_N)
    intervals = intervals_of(sums_GS, [quotient(2 * place) for place in range(len(names))])
    single = row_N.max(initial=-1) + 1 == len(row_N)
    means = {}
    for name, mean in zip(names, intervals, strict=True):
        values = rows.metrics[name][np.isfinite(rows.metrics[name])]
        means[name] = wilson(int(values.sum()), len(values)) if single and name in rows.proportions else mean
    return means


def add_histograms(histogram: NDArray[np.int64], column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The histogram plus those of a column's rows."""
    flat_values = pc.list_flatten(column).to_numpy()
    lengths = pc.list_value_length(column.drop_null()).to_numpy()
    place = np.arange(len(flat_values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sums = np.bincount(place, weights=flat_values, minlength=len(histogram)).astype(np.int64)
    sums[: len(histogram)] += histogram
    return sums


def at_least(accept_hist: NDArray[np.int64]) -> NDArray[np.float64]:
    """Entry j - 1: the share of iterations that committed at least j tokens, j = 1 ..; without the zeros at the end."""
    total = accept_hist.sum()
    if not total:
        return np.zeros(0)
    shares = accept_hist[::-1].cumsum()[::-1][1:] / total
    return np.asarray(shares[shares > 0], np.float64)


def by_length(tokens_N: NDArray[np.int32], nfe_N: NDArray[np.int32]) -> Curve:
    """Mean new tokens and mean NFE of the samples in each of LENGTHS bins of new tokens; bins without samples are skipped."""
    bin_N = tokens_N.astype(np.int64) * LENGTHS // (tokens_N.max(initial=0) + 1)
    counts = np.bincount(bin_N, minlength=LENGTHS)
    tokens, nfe = (np.bincount(bin_N, values, LENGTHS)[counts > 0] / counts[counts > 0] for values in (tokens_N, nfe_N))
    return tokens, nfe


def courses_of(
    start_N: NDArray[np.float64], end_N: NDArray[np.float64], tokens_N: NDArray[np.int32]
) -> tuple[Curve, Curve]:
    """Tokens per second, and samples in a slot, in equal bins of time, at the middle of each; empty without samples.

    `start_N` and `end_N` are each sample's first and last moment in a slot, over which its tokens are spread evenly. Times are
    seconds since the first sample got a slot, without pauses.
    """
    order = np.argsort(start_N, kind="stable")
    start, end, tokens = start_N[order], end_N[order], tokens_N[order]
    reached = np.maximum.accumulate(end)
    pause = np.maximum(start[1:] - reached[:-1], 0.0)
    cut = np.where(pause > np.maximum(GAP_S, (reached[:-1] - start[:1]) / 20), pause, 0.0)
    shift = np.concatenate([np.zeros(len(start[:1])), np.cumsum(cut)]) + start[:1]
    start, end = start - shift, end - shift
    last = float(end.max(initial=0.0))
    if last <= 0:
        return (np.zeros(0), np.zeros(0)), (np.zeros(0), np.zeros(0))
    edges = np.linspace(0.0, last, (12 if len(start) < 200 else TIME_BINS) + 1)
    width, middles = edges[1], (edges[1:] + edges[:-1]) / 2
    stay = np.maximum(end - start, width / 1000)  # also for samples that took no time at all
    start = np.maximum(end - stay, 0.0)
    stayed = (np.clip(edge - start, 0.0, stay) for edge in edges)  # one edge at a time is in memory
    rates, active = np.diff([((tokens * time / stay).sum(), time.sum()) for time in stayed], axis=0).T / width
    return (middles, rates), (middles, active)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- plots

WIDE, HIGH, LEFT, BELOW = 420, 240, 52, 40
"""A plot's width and height, and the room for the numbers of its axes, in units of the drawing."""

SIZE: Final = {"wide": WIDE, "high": HIGH, "left": LEFT, "below": BELOW}

METRICS: Final = 4
"""The number of metrics, by name, that are drawn; the tables have all."""


@dataclass(frozen=True, slots=True)
class PlotLine:
    """What a plot shows of the case `number`: points that are joined, or one point with the interval of its y."""

    number: int
    name: str
    x: Sequence[float]
    y: Sequence[float]
    bounds: tuple[float, float] | None = None

    @property
    def words(self) -> str:
        """The first and the last point, and the largest y."""
        last = (
            f", {number(self.y[-1])} at {number(self.x[-1])}, at most {number(max(self.y))}" if len(self.x) > 1 else ""
        )
        return f"{self.name}: {number(self.y[0])} at {number(self.x[0])}{last}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with two axes; `grey` is a line that belongs to no case. `from_zero`: whether the y axis begins at 0."""

    title: str
    x: str
    y: str
    lines: Sequence[PlotLine]
    grey: Sequence[tuple[float, float]] = ()
    from_zero: bool = True

    @property
    def description(self) -> str:
        """The figures in words."""
        return f"{self.y} by {self.x}. " + "; ".join(line.words for line in self.lines)

    def drawn(self) -> dict[str, Any]:
        """Where everything is, in the units of the drawing: ticks with their texts, lines, points and intervals."""
        xs = [value for line in self.lines for value in line.x]
        ys = [value for line in self.lines for value in (*line.y, *(line.bounds or ()))]
        x_ticks, y_ticks = ticks(0.0, max(xs)), ticks(0.0 if self.from_zero else min(ys), max(ys))

        def at(x: float, y: float) -> tuple[float, float]:
            across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
            up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
            return round(LEFT + across * (WIDE - LEFT - 14), 1), round(HIGH - BELOW - up * (HIGH - BELOW - 10), 1)

        inside = [(x, y) for x, y in self.grey if x <= x_ticks[-1] and y <= y_ticks[-1]]
        return {
            "x_ticks": [(at(value, y_ticks[0])[0], f"{value:,.6g}") for value in x_ticks],
            "y_ticks": [(at(x_ticks[0], value)[1], f"{value:,.6g}") for value in y_ticks],
            "grey": [at(*point) for point in inside],
            "lines": [
                {
                    "number": line.number,
                    "points": [at(x, y) for x, y in zip(line.x, line.y, strict=True)],
                    "bounds": None if line.bounds is None else [at(line.x[0], bound)[1] for bound in line.bounds],
                }
                for line in self.lines
            ],
        }


def ticks(low: float, high: float) -> list[float]:
    """Two to seven round numbers, the first at most `low` and the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if span <= 5 * power * factor)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def frontier(points: Sequence[tuple[float, float]], better: Better | None) -> list[tuple[float, float]]:
    """The points (cost, quality) that no other point beats at equal or lower cost, by cost; none if `better` is not known."""
    if better is None:
        return []
    sign = 1 if better == "higher" else -1
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not best or sign * quality > sign * best[-1][1]:
            best.append((cost, quality))
    return best


def quality_plots(cases: Sequence[RunStatistics]) -> Iterator[Plot]:
    """Each metric against NFE and against device time per token; without metrics, these against each other."""
    numbered = [(place, case) for place, case in enumerate(cases, 1) if case.figures.nfe_per_token]
    if len(numbered) < 2:
        return
    names = sorted({name for _, case in numbered for name in case.metrics})[:METRICS]
    (nfe, nfe_of), (device, device_of) = COSTS.items()
    if not names:
        lines = [PlotLine(n, case.figures.name, [nfe_of(case)], [device_of(case)]) for n, case in numbered]
        yield Plot("Forwards and device time", nfe, device, lines)
    for name in names:
        shown = [(n, case, case.metrics[name]) for n, case in numbered if name in case.metrics]
        for label, cost_of in COSTS.items():
            best = frontier([(cost_of(case), mean.value) for _, case, mean in shown], shown[0][1].better.get(name))
            lines = [PlotLine(n, case.figures.name, [cost_of(case)], [m.value], _bounds(m)) for n, case, m in shown]
            yield Plot("Quality against cost", label, name, lines, best if len(best) > 1 else (), from_zero=False)


COSTS: Final[dict[str, Callable[[RunStatistics], float]]] = {
    "NFE per token": lambda case: case.figures.nfe_per_token or 0.0,
    "device ms per token": lambda case: 1000 * (case.figures.device_s_per_token or 0.0),
}


def _bounds(mean: Interval) -> tuple[float, float]:
    return (mean.value if mean.low is None else mean.low), (mean.value if mean.high is None else mean.high)


def curve_plot(
    title: str, x: str, y: str, cases: Sequence[RunStatistics], curve_of: Callable[[RunStatistics], Curve], **more: Any
) -> Iterator[Plot]:
    """A plot with a line for each case that has one; none if no case has."""
    curves = [(place, case.figures.name, *curve_of(case)) for place, case in enumerate(cases, 1)]
    lines = [PlotLine(place, name, xs.tolist(), ys.tolist()) for place, name, xs, ys in curves if len(xs)]
    if lines:
        yield Plot(title, x, y, lines, **more)


def acceptance_of(case: RunStatistics) -> Curve:
    """The positions in an iteration, and the share of iterations that got that far; empty for a job that scores."""
    reached = at_least(case.accept_hist) if case.run.plan.spec.task.kind != "score" else np.zeros(0)
    return np.arange(1.0, len(reached) + 1), reached


# ---- sections and tables

Part = dict[str, Any]
"""A part of a section, as the template shows it: its `kind`, and what such a part has."""


def _plots(section: str, plots: Iterable[Plot]) -> list[Part]:
    drawn = [{"plot": plot, **plot.drawn()} for plot in plots]
    names = sorted({(line.number, line.name) for one in drawn for line in one["plot"].lines})
    return (
        [{"kind": "plots", "drawn": drawn, "names": names, "caption": CAPTIONS[section], "size": SIZE}] if drawn else []
    )


def _table(title: str, rows: Sequence[Sequence[str]], *, words: Sequence[int] = (), is_one: bool = False) -> Part:
    """A table with a header row; `words` are columns of text. If there `is_one` case, the column of its name is left out."""
    return {
        "kind": "table", "title": title, "rows": [row[is_one:] for row in rows], "words": [n - is_one for n in words]
    }  # fmt: skip


def _facts(title: str, pairs: Iterable[tuple[str, object]]) -> Part:
    return {"kind": "facts", "title": title, "pairs": list(pairs)}


def _note(text: str) -> Part:
    return {"kind": "note", "text": text}


def _details(title: str, data: Any) -> Part:
    """Data as YAML that the reader can open."""
    return {"kind": "details", "title": title, "text": yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}


def comparisons_of(runs: Sequence[FinishedRun], baseline: str | None = None) -> list[Comparisons]:
    """Paired comparisons of the runs that decoded the same, with `baseline` where it is among them."""
    groups: list[list[FinishedRun]] = []
    for run in runs:
        for group in groups:
            with suppress(UserError):
                check_same_work(group[0].name, group[0].plan, run.name, run.plan)
                group.append(run)
                break
        else:
            groups.append([run])
    return [
        compare_runs(group, baseline=baseline if any(run.name == baseline for run in group) else None)
        for group in groups
        if len(group) > 1
    ]


CAPTIONS: Final = {
    "quality": (
        f"Means over the samples, with intervals of {LEVEL:.0%}. The grey line joins the cases that no other case beats at "
        f"equal or lower cost. At most {METRICS} metrics are drawn; the table has all."
    ),
    "acceptance": (
        "The share of iterations that committed at least j tokens. Where an iteration commits the accepted drafts and one "
        "more token, that is how often the draft at position j - 1 was accepted together with all before it."
    ),
    "effort": (
        "Forwards in which a sample took part: means over samples of about the same length. On the grey line a sample "
        "takes one forward per token."
    ),
    "time": ("Seconds of decoding, without pauses. The tokens of a sample are spread evenly over its time in a slot."),
}


def _sections(cases: Sequence[RunStatistics], compared: Sequence[Comparisons]) -> Iterator[dict[str, Any]]:
    longest = max(float(case.nfe_by_length[0].max(initial=0.0)) for case in cases)
    line = [(place * longest / 50, place * longest / 50) for place in range(51)]
    accepted = curve_plot("Acceptance by position", "position j in the iteration", "share", cases, acceptance_of)
    lengths = curve_plot(
        "NFE against length", "new tokens", "mean NFE", cases, lambda one: one.nfe_by_length, grey=line
    )
    rates = curve_plot("Throughput", "seconds", "tokens per second", cases, lambda case: case.rates)
    active = curve_plot("Active slots", "seconds", "samples in a slot", cases, lambda case: case.active)
    for name, title, parts in (
        ("results", "Results", [_results(cases)]),
        ("quality", "Quality against cost", [*_plots("quality", quality_plots(cases)), *_metrics(cases)]),
        ("acceptance", "Acceptance", _plots("acceptance", accepted)),
        ("effort", "Forwards", _plots("effort", lengths)),
        ("time", "Time", [*_plots("time", [*rates, *active]), *_device_times(cases), *_times(cases)]),
        ("pairs", "Paired comparison", [part for group in compared for part in _comparison(group)]),
        ("errors", "Errors", [_errors(cases)]),
        ("run", "What was run", list(_what_was_run(cases))),
    ):
        yield {"name": name, "title": title, "parts": parts}


def _lead(cases: Sequence[RunStatistics], unfinished: Sequence[str]) -> str:
    if len(cases) == 1:
        spec = cases[0].run.plan.spec
        return f"{spec.decoder.kind} on {spec.model.path}, task {spec.task.kind}, {counted(cases[0].figures.samples, 'sample')}"
    skipped = f" Not finished, and skipped: {', '.join(unfinished)}." if unfinished else ""
    samples = sum(case.figures.samples for case in cases)
    return f"{counted(len(cases), 'case')}, {samples:,} samples.{skipped}"


def _results(cases: Sequence[RunStatistics]) -> Part:
    if len(cases) == 1:
        return _facts("The run in figures", _run_figures(cases[0]))
    figures = [case.figures for case in cases]
    return _table("Each case over its own samples", runs_table(figures, with_metrics=False), words=[1])


def _run_figures(case: RunStatistics) -> Iterator[tuple[str, str]]:
    yield from sample_rows(case.sums, case.run.plan.spec.task.done)
    if case.figures.nfe_draft_per_token:
        yield "draft NFE per token", number(case.figures.nfe_draft_per_token)
    yield "device ms per token", number(1000 * (case.figures.device_s_per_token or 0.0))
    yield from machine_rows(case.sums, case.sessions)
    yield from device_time_rows(case.spent)


def _device_times(cases: Sequence[RunStatistics]) -> list[Part]:
    """Device time by purpose, if it is known of any case."""
    if len(cases) == 1 or not any(case.spent.up_s for case in cases):
        return []
    rows = [["run", "device time", *PURPOSES]]
    for case in cases:
        rows.append([case.figures.name, *map(hours_text, [case.spent.up_s, *purposes_of(case.spent).values()])])
    return [_table("Device time", rows)]


def _times(cases: Sequence[RunStatistics]) -> list[Part]:
    rows = [[case.figures.name, name, *map(number, values)] for case in cases for name, values in case.times.items()]
    head = ["case", "seconds of a sample", "median", "95 % are below"]
    return [_table("Times", [head, *rows], is_one=len(cases) == 1, words=[1])] if rows else []


def _metrics(cases: Sequence[RunStatistics]) -> list[Part]:
    rows = [["case", "metric", f"mean ({LEVEL:.0%} interval)", "samples"]]
    for case in cases:
        for name, mean in case.metrics.items():
            between = "" if mean.low is None or mean.high is None else f" ({number(mean.low)} to {number(mean.high)})"
            rows.append([case.figures.name, name, f"{number(mean.value)}{between}", f"{case.metric_rows[name]:,}"])
    title = "Metrics: means over the samples that have a value"
    return [_table(title, rows, is_one=len(cases) == 1)] if len(rows) > 1 else []


def _comparison(comparisons: Comparisons) -> Iterator[Part]:
    for comparison in comparisons.against:
        figures, *others = comparison_tables(comparison)
        yield _table(heading(comparison), figures, words=[3, 4])
        yield from (_table("What the pairs are worth", table, words=[1, 2, 3]) for table in others)
        yield from map(_note, remarks(comparison))
    yield from map(_note, notes(comparisons))


def _errors(cases: Sequence[RunStatistics]) -> Part:
    rows = [
        [case.figures.name, kind, f"{count:,}", *map(brief_line, case.sums.examples.get(kind, [(0, "", "")])[0][1:])]
        for case in cases
        for kind, count in sorted(case.sums.errors.items(), key=lambda item: (-item[1], item[0]))
    ]
    if not rows:
        return _note("No sample failed.")
    head = ["case", "class", "samples", "first id", "its message"]
    title = "Failed samples, with the first of each class"
    return _table(title, [head, *rows], is_one=len(cases) == 1, words=[3, 4])


def _what_was_run(cases: Sequence[RunStatistics]) -> Iterator[Part]:
    """What all cases share, once, and for each case what differs; the whole spec of the first, and of the others what differs."""
    jobs = [dict(_job(case)) for case in cases]
    specs = [dict(flat(case.run.plan.spec.model_dump(mode="json"))) for case in cases]
    shared = {name: value for name, value in jobs[0].items() if all(job.get(name) == value for job in jobs)}
    yield _facts("The job" if len(cases) == 1 else "The same in all cases", shared.items())
    for case, job in zip(cases, jobs, strict=True):
        if own := {name: value for name, value in job.items() if name not in shared}:
            yield _facts(case.figures.name, own.items())
    title = "The whole spec" if len(cases) == 1 else f"The whole spec of {cases[0].figures.name}"
    yield _details(title, cases[0].run.plan.spec.model_dump(mode="json"))
    for case, spec in zip(cases[1:], specs[1:], strict=True):
        differs = {key: value for key, value in spec.items() if specs[0].get(key, ...) != value}
        differs |= dict.fromkeys(specs[0].keys() - spec.keys(), "not set")
        yield _details(f"How the spec of {case.figures.name} differs", differs)


def _job(case: RunStatistics) -> Iterator[tuple[str, Any]]:
    plan = case.run.plan
    spec, results, model = plan.spec, plan.results, plan.results["model"]
    yield "name", spec.name
    yield "fingerprint", plan.fingerprint
    yield "task", _settings(spec.task)
    yield "model", f"{spec.model.path} ({model['family']}, weights {model['checkpoint'][:12]})"
    yield "decoder", _settings(spec.decoder)
    yield "sampling", f"seed {spec.seed}, {_settings(spec.sampling)}"
    files = ", ".join(f"{file.name} ({file.size or 0:,} bytes)" for file in plan.files[:5])
    more = f" and {len(plan.files) - 5:,} more" if len(plan.files) > 5 else ""
    yield "inputs", f"{files}{more}"
    yield (
        "rows and passes",
        f"{counted(plan.rows, 'sample')} in {counted(plan.units, 'unit')}, passes: {len(case.run.passes)}",
    )
    yield "draftmill", f"version {plan.code_version}, result schema {results['schema_version']}"
    yield "workers", f"{case.workers:,} with results"
    for text, count in case.sessions.started_on.items():
        yield "started", f"{count:,} on {text}"
    if case.period is not None:
        yield "decoded", case.period
    yield "exact", exactness(all_exact(pass_.manifest.exact for pass_ in case.run.passes if pass_.manifest is not None))


def _settings(settings: BaseModel) -> str:
    values = settings.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.strip()[1:-1]
