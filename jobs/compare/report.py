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
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import BaseModel

from draftmill.actors.metrics.settings import Better
from draftmill.jobs.compare.compare import comparison_tables, heading, interval_text, notes, number, remarks, runs_table
from draftmill.jobs.compare.comparison import Comparisons, baselines_of, compare_runs, figures_of
from draftmill.jobs.compare.rows import numbers, read_rows, row_numbers
from draftmill.jobs.compare.runs import FinishedRun, check_same_work, find_runs
from draftmill.jobs.compare.statistics import LEVEL, mean_of
from draftmill.jobs.config.sweep_spec import RECORD
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.drive.totals import PURPOSES, DeviceSums, device_time_rows, exactness, hours_text, purposes_of
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.fingerprint import flat
from draftmill.jobs.results.export import open_whole
from draftmill.jobs.results.passes import latest_rows
from draftmill.jobs.results.summary import machine_rows, sample_rows, sums_of
from draftmill.storage.errors import UserError, printable
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.records import brief_line
from draftmill.storage.stores.store import Place, is_local, open_store

MADE_BY: Final = b'<meta name="generator" content="draftmill'
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

    UserError, before the page is made, if the file can't be written, or exists and is something else.
    """
    if not is_local(out):
        raise UserError(f"{out!r} is not a local file", field=field)
    target = Path(os.path.expanduser(out))
    if target.is_file() and not overwrite:
        with target.open("rb") as file:
            if MADE_BY not in file.read(1000):
                raise UserError(f"{out!r} exists and is not a page of draftmill; --overwrite replaces it", field=field)
    with open_whole(Place(out), field=field, overwrite=True) as whole:
        content = page().encode()
        whole.write(content)
    return len(content)


def report_page(place: Place, baseline: str | None) -> str:
    """The page of a run, or of a sweep's cases with their short names; UserError without a run, or one named `baseline`."""
    runs, unfinished = find_runs([place])
    if not runs:
        raise UserError(f"no finished run to report on; not finished: {', '.join(unfinished)}")
    is_sweep = open_store(place).exists(RECORD)
    title = f"Sweep: {place.url.rstrip('/').rpartition('/')[2]}" if is_sweep else f"Run: {runs[0].plan.spec.name}"
    named = [replace(run, name=run.short or run.name) for run in runs]
    first = None if baseline is None or len(named) < 2 else named[baselines_of(runs, baseline)[0]].name
    cases = [RunStatistics(run) for run in named]
    sections = [section for section in _sections(cases, comparisons_of(named, first)) if section[-1]]
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
    environment.filters["number"] = number
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


class RunStatistics:
    """One run, reduced to what a report shows; about 100 bytes a sample are in memory meanwhile.

    `nfe_by_length` has means; `rates` and `active` are tokens per second and samples in a slot over time; `times` has the
    QUANTILES of the seconds of a sample, by what they are; `costs` are what quality is drawn against.
    """

    def __init__(self, run: FinishedRun) -> None:
        self.run, rows = run, read_rows(run)
        ok, tokens_N = rows.ok_N, rows.counts["new_tokens"]
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
        start, end = start_N[timed], (start_N + resident_N)[timed]
        moments = (datetime.fromtimestamp(edge, UTC) for edge in (start.min(), end.max())) if len(start) else ()
        self.period = " to ".join(f"{moment:%Y-%m-%d %H:%M:%S UTC}" for moment in moments)
        times = {"wait for a slot": wait_N, "time in a slot": resident_N, "device time": rows.device_s_N}
        self.times = {name: np.quantile(values[ok], QUANTILES) for name, values in times.items() if values[ok].any()}
        self.rates, self.active = courses_of(start, end, tokens_N[timed])
        self.nfe_by_length = by_length(tokens_N[ok], rows.counts["nfe"][ok])
        self.accept_hist, self.workers = histogram, len(workers)
        self.acceptance = acceptance_by_position(histogram if run.plan.spec.task.kind != "score" else histogram[:0])
        self.figures = figures_of(run, rows)
        self.name = self.figures.name
        self.costs = {
            "NFE per token": self.figures.nfe_per_token or 0.0,
            "device ms per token": 1000 * (self.figures.device_s_per_token or 0.0),
        }
        row_N, self.better = row_numbers(rows.ids, rows.ids), rows.better
        shares = rows.proportions if row_N.max(initial=-1) + 1 == len(row_N) else ()  # of rows with one sample
        self.metrics = {
            name: mean_of(values_N, None if name in shares else row_N) for name, values_N in rows.metrics.items()
        }
        self.metric_rows = {name: int(np.isfinite(column).sum()) for name, column in rows.metrics.items()}
        self.sums, self.sessions = sums_of(run.passes), read_sessions(run.store)
        self.spent = sum((read_sessions(pass_.store).devices for pass_ in run.passes), DeviceSums())


def add_histograms(histogram: NDArray[np.int64], column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The histogram plus those of a column's rows."""
    flat_values = pc.list_flatten(column).to_numpy()
    lengths = pc.list_value_length(column.drop_null()).to_numpy()
    place = np.arange(len(flat_values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sums = np.bincount(place, weights=flat_values, minlength=len(histogram)).astype(np.int64)
    sums[: len(histogram)] += histogram
    return sums


def acceptance_by_position(accept_hist: NDArray[np.int64]) -> Curve:
    """The positions j = 1 .. in an iteration, and the share of iterations with at least j tokens; only shares above 0."""
    reached = accept_hist[::-1].cumsum()[::-1]
    shares = reached[1:][reached[1:] > 0] / max(1, reached.max(initial=0))
    return np.arange(1.0, len(shares) + 1), shares


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


# ---- plots

METRICS: Final = 4
"""The number of metrics, by name, that are drawn; the tables have all."""

Point = tuple[float, float]


class PlotLine(NamedTuple):
    """What a plot shows of the case `number`: points that are joined, or one point with the interval of its y."""

    number: int
    name: str
    points: Sequence[Point]
    interval: Sequence[Point] = ()


class Plot:
    """A drawing with two axes; `grey` is a line that belongs to no case. `from_zero`: whether the y axis begins at 0."""

    WIDE, HIGH, LEFT, RIGHT, BELOW, ABOVE = 420, 240, 52, 14, 40, 10
    """Its width and height, and the room around the axes, in units of the drawing."""

    def __init__(
        self, title: str, x: str, y: str, lines: Sequence[PlotLine], grey: Iterable[Point] = (), from_zero: bool = True
    ) -> None:
        self.title, self.x, self.y, self.lines = title, x, y, lines
        xs, ys = zip(*(point for line in lines for point in (*line.points, *line.interval)), strict=True)
        self.x_ticks, self.y_ticks = ticks(0.0, max(xs)), ticks(0.0 if from_zero else min(ys), max(ys))
        self.grey = [point for point in grey if point[0] <= self.x_ticks[-1] and point[1] <= self.y_ticks[-1]]

    def at(self, point: Point) -> Point:
        """Where a point is in the drawing."""
        across, up = (
            (value - first) / (last - first)
            for value, (first, *_, last) in zip(point, (self.x_ticks, self.y_ticks), strict=True)
        )
        x, y = self.LEFT + across * (self.WIDE - self.LEFT - self.RIGHT), up * (self.HIGH - self.BELOW - self.ABOVE)
        return round(x, 1), round(self.HIGH - self.BELOW - y, 1)


def ticks(low: float, high: float) -> list[float]:
    """Two to seven round numbers, the first at most `low` and the last at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if span <= 5 * power * factor)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, max(last, first + 1) + 1)]


def frontier(points: Sequence[Point], better: Better | None) -> list[Point]:
    """The points (cost, quality) that no other point beats at equal or lower cost, by cost; none if `better` is not known."""
    if better is None:
        return []
    sign = 1 if better == "higher" else -1
    best: list[Point] = []
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
    nfe, device = labels = list(cases[0].costs)
    if not names:
        lines = [PlotLine(place, case.name, [(case.costs[nfe], case.costs[device])]) for place, case in numbered]
        yield Plot("Forwards and device time", nfe, device, lines)
    for name, label in product(names, labels):
        shown = [
            (place, case, case.costs[label], case.metrics[name]) for place, case in numbered if name in case.metrics
        ]
        best = frontier([(cost, mean.value) for _, _, cost, mean in shown], shown[0][1].better.get(name))
        lines = [
            PlotLine(place, case.name, [(cost, mean.value)], [(cost, end) for end in mean.bounds])
            for place, case, cost, mean in shown
        ]
        yield Plot("Quality against cost", label, name, lines, best if len(best) > 1 else (), from_zero=False)


def _curves(
    cases: Sequence[RunStatistics],
    curve_of: Callable[[RunStatistics], Curve],
    titles: tuple[str, str, str],
    grey: Sequence[Point] = (),
) -> list[Plot]:
    """A plot, with titles of itself and its axes, with a line for each case that has one; none if no case has."""
    curves = [(place, case.name, *map(np.ndarray.tolist, curve_of(case))) for place, case in enumerate(cases, 1)]
    lines = [PlotLine(place, name, list(zip(xs, ys, strict=True))) for place, name, xs, ys in curves if xs]
    return [Plot(*titles, lines, grey)] if lines else []


# ---- sections and tables

Part = str | dict[str, Any]
"""A part of a section, as the template shows it: a note, a table, plots, or a text that the reader can open."""


def _plots(plots: Sequence[Plot]) -> list[Part]:
    names = sorted({(line.number, line.name) for plot in plots for line in plot.lines})
    return [{"plots": plots, "names": names}] if plots else []


def _table(title: str, rows: Iterable[Sequence[object]], *, words: Sequence[int] = (), has_head: bool = True) -> Part:
    """A table, of facts if it has no head; `words` are columns of text."""
    return {"title": title, "rows": list(rows), "words": words, "has_head": has_head}


def _by_case(title: str, cases: Sequence[RunStatistics], rows: Iterable[Sequence[str]], *words: int) -> list[Part]:
    """A table with the case's name in the first column, which a single case does not need; none without rows but the head."""
    skip, rows = len(cases) == 1, list(rows)
    return [_table(title, [row[skip:] for row in rows], words=[n - skip for n in words])] if len(rows) > 1 else []


def _details(title: str, data: Any) -> Part:
    """Data as YAML that the reader can open."""
    return {"title": title, "text": yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}


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


def _sections(cases: Sequence[RunStatistics], compared: Sequence[Comparisons]) -> list[tuple[str, str, list[Part]]]:
    """The name, the title and the parts of each section; page.html.j2 explains its plots."""
    metrics = [["case", "metric", f"mean [{LEVEL:.0%} interval]", "samples"]]
    times = [["case", "seconds of a sample", "median", "95 % are below"]]
    errors = [["case", "class", "samples", "first id", "its message"]]
    device_times = [["case", "device time", *PURPOSES]]
    for case in cases:
        for name, mean in case.metrics.items():
            metrics.append([case.name, name, number(mean.value) + interval_text(mean), f"{case.metric_rows[name]:,}"])
        times += [[case.name, name, *map(number, values)] for name, values in case.times.items()]
        for kind, count in sorted(case.sums.errors.items(), key=lambda item: (-item[1], item[0])):
            _, *first = case.sums.examples.get(kind, [(0, "", "")])[0]
            errors.append([case.name, kind, f"{count:,}", *map(brief_line, first)])
        if len(cases) > 1 and any(each.spent.up_s for each in cases):
            seconds = [case.spent.up_s, *purposes_of(case.spent).values()]
            device_times.append([case.name, *map(hours_text, seconds)])
    longest = max(float(case.nfe_by_length[0].max(initial=0.0)) for case in cases)
    line = [(place * longest / 50, place * longest / 50) for place in range(51)]
    acceptance = ("Acceptance by position", "position j in the iteration", "share")
    accepted = _curves(cases, lambda case: case.acceptance, acceptance)
    effort = ("NFE against length", "new tokens", "mean NFE")
    lengths = _curves(cases, lambda case: case.nfe_by_length, effort, line)
    rates = _curves(cases, lambda case: case.rates, ("Throughput", "seconds", "tokens per second"))
    active = _curves(cases, lambda case: case.active, ("Active slots", "seconds", "samples in a slot"))
    metric_table = _by_case("Metrics: means over the samples that have a value", cases, metrics)
    time_tables = [*_by_case("Device time", cases, device_times), *_by_case("Times", cases, times, 1)]
    failed = _by_case("Failed samples, with the first of each class", cases, errors, 3, 4)
    return [
        ("results", "Results", [_results(cases)]),
        ("quality", "Quality against cost", [*_plots(list(quality_plots(cases))), *metric_table]),
        ("acceptance", "Acceptance", _plots(accepted)),
        ("effort", "Forwards", _plots(lengths)),
        ("time", "Time", [*_plots([*rates, *active]), *time_tables]),
        ("pairs", "Paired comparison", [part for group in compared for part in _comparison(group)]),
        ("errors", "Errors", failed or ["No sample failed."]),
        ("run", "What was run", list(_what_was_run(cases))),
    ]


def _lead(cases: Sequence[RunStatistics], unfinished: Sequence[str]) -> str:
    if len(cases) == 1:
        spec = cases[0].run.plan.spec
        return f"{spec.decoder.kind} on {spec.model.path}, task {spec.task.kind}, {counted(cases[0].figures.samples, 'sample')}"
    skipped = f" Not finished, and skipped: {', '.join(unfinished)}." if unfinished else ""
    samples = sum(case.figures.samples for case in cases)
    return f"{counted(len(cases), 'case')}, {samples:,} samples.{skipped}"


def _results(cases: Sequence[RunStatistics]) -> Part:
    if len(cases) > 1:
        figures = [case.figures for case in cases]
        return _table("Each case over its own samples", runs_table(figures, with_metrics=False), words=[1])
    [case] = cases
    rows = sample_rows(case.sums, case.run.plan.spec.task.done)
    if case.figures.nfe_draft_per_token:
        rows.append(("draft NFE per token", number(case.figures.nfe_draft_per_token)))
    rows.append(("device ms per token", number(1000 * (case.figures.device_s_per_token or 0.0))))
    rows += [*machine_rows(case.sums, case.sessions), *device_time_rows(case.spent)]
    return _table("The run in figures", rows, has_head=False)


def _comparison(comparisons: Comparisons) -> Iterator[Part]:
    for comparison in comparisons.against:
        figures, *others = comparison_tables(comparison)
        yield _table(heading(comparison), figures, words=[3, 4])
        yield from (_table("What the pairs are worth", table, words=[1, 2, 3]) for table in others)
        yield from remarks(comparison)
    yield from notes(comparisons)


def _what_was_run(cases: Sequence[RunStatistics]) -> Iterator[Part]:
    """What all cases share, once, and for each case what differs; the whole spec of the first, and of the others what differs."""
    jobs = [dict(_job(case)) for case in cases]
    specs = [dict(flat(case.run.plan.spec.model_dump(mode="json"))) for case in cases]
    shared = {name: value for name, value in jobs[0].items() if all(job.get(name) == value for job in jobs)}
    yield _table("The job" if len(cases) == 1 else "The same in all cases", shared.items(), has_head=False)
    for case, job in zip(cases, jobs, strict=True):
        if own := {name: value for name, value in job.items() if name not in shared}:
            yield _table(case.name, own.items(), has_head=False)
    title = "The whole spec" if len(cases) == 1 else f"The whole spec of {cases[0].figures.name}"
    yield _details(title, cases[0].run.plan.spec.model_dump(mode="json"))
    for case, spec in zip(cases[1:], specs[1:], strict=True):
        differs = {key: value for key, value in spec.items() if specs[0].get(key, ...) != value}
        differs |= dict.fromkeys(specs[0].keys() - spec.keys(), "not set")
        yield _details(f"How the spec of {case.name} differs", differs)


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
    size = f"{counted(plan.rows, 'sample')} in {counted(plan.units, 'unit')}"
    yield "rows and passes", f"{size}, passes: {len(case.run.passes)}"
    yield "draftmill", f"version {plan.code_version}, result schema {results['schema_version']}"
    yield "workers", f"{case.workers:,} with results"
    for text, count in case.sessions.started_on.items():
        yield "started", f"{count:,} on {text}"
    if case.period:
        yield "decoded", case.period
    yield "exact", exactness(all_exact(pass_.manifest.exact for pass_ in case.run.passes if pass_.manifest is not None))


def _settings(settings: BaseModel) -> str:
    values = settings.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return text.strip()[1:-1]
