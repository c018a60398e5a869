"""The five plots of a report, each with a caption and its figures in words: matplotlib figures as SVG.

    quality         what each metric costs in forwards and in device time: a point per case of a sweep
    acceptance      how many tokens an iteration commits
    length          forwards against the length of a sample
    course          tokens per second, and samples in a slot, over time
    times           how long samples wait, are in a slot, and use the device

The SVG has no addresses, ids of its own, and the same bytes every time.
"""

from __future__ import annotations

import html
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.metrics.settings import Better
from draftmill.jobs.analysis.compare import number
from draftmill.jobs.analysis.run_statistics import WIDE, Course, RunStatistics, Spread, at_least
from draftmill.jobs.analysis.statistics import LEVEL, Interval
from draftmill.storage.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 8.6
POINTS_WIDE: Final = 590.0
"""Points of a figure's width that a legend may take; LETTER is the width of a letter in it."""

LETTER: Final = 5.2
PANEL_LETTERS: Final = 84
"""Letters of titles that fit next to each other, in all panels of a row."""

TICK_LETTERS: Final = 30
SCATTER_UP_TO: Final = 2000
"""Above this many points a plot counts them in hexagons."""

PANELS: Final = 12
METRICS: Final = 4
"""The number of metrics, by name, that are drawn; the tables have all."""

MANY_BINS: Final = 24


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure, what it shows (`title`, `caption`), and what can be seen in it, in words (`description`)."""

    figure: Figure
    title: str
    caption: str
    description: str


def _plot(figure: Figure, title: str, caption: str, cases: Sequence[RunStatistics], words: Iterable[str]) -> Plot:
    """A plot whose description has a part for each case."""
    parts = [f"{case.figures.name}: {text}" for case, text in zip(cases, words, strict=True)]
    return Plot(figure, title, caption, "; ".join(parts))


# ---- quality against cost


def quality_plot(cases: Sequence[RunStatistics]) -> Plot | None:
    """Each metric against NFE and device time per token, with the interval of its mean; without metrics one against the other."""
    cases = [case for case in cases if case.figures.nfe_per_token]
    if len(cases) < 2:
        return None
    all_names = sorted({name for case in cases for name in case.metrics})
    names, has_frontier = all_names[:METRICS], False
    styles = styles_of(cases)
    if not names:
        figure, (axes,) = _axes(3.2)
        for case, style in zip(cases, styles, strict=True):
            _point(axes, nfe_cost(case), device_cost(case), style, case.figures.name)
        _label(axes, "NFE per token", "device ms per token")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _legend_below(figure, axes)
        caption = "Fewer forwards save time only as far as a forward with drafts costs as much as one without."
        return _plot(figure, "Forwards and device time per token", caption, cases, map(_cost_words, cases))
    figure, grid = _axes(2.9 * len(names), columns=2, rows=len(names), share_y="row")
    for name, pair in zip(names, zip(grid[::2], grid[1::2], strict=True), strict=True):
        shown = [(case, style) for case, style in zip(cases, styles, strict=True) if name in case.metrics]
        for axes, label, cost in zip(
            pair, ("NFE per token", "device ms per token"), (nfe_cost, device_cost), strict=True
        ):
            best = frontier([(cost(case), case.metrics[name].value) for case, _ in shown], shown[0][0].better.get(name))
            if len(best) > 1:
                has_frontier = True
                axes.plot(*zip(*best, strict=True), color="#aaaaaa", linewidth=1.2, zorder=1)
            for case, style in shown:
                axes.plot([cost(case)] * 2, _bounds(case.metrics[name]), color=style.colour, linewidth=1.2)
                _point(axes, cost(case), case.metrics[name].value, style, case.figures.name)
            _label(axes, label, name if axes is pair[0] else "")
    _legend_below(figure, *grid)
    caption = f"Means over the samples; vertical lines are {LEVEL:.0%} intervals."
    if has_frontier:
        caption += " The grey line joins the cases that no other case beats at equal or lower cost."
    if left_out := all_names[METRICS:]:
        caption += f" Not drawn, but in the table of metrics: {', '.join(left_out)}."
    means = [
        [f"{name} {interval_words(case.metrics[name])}" for name in names if name in case.metrics] for case in cases
    ]
    words = [f"{', '.join(parts)} at {_cost_words(case)}" for case, parts in zip(cases, means, strict=True)]
    return _plot(figure, "Quality against cost", caption, cases, words)


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


def nfe_cost(case: RunStatistics) -> float:
    """NFE per token; 0 without tokens."""
    return case.figures.nfe_per_token or 0.0


def device_cost(case: RunStatistics) -> float:
    """Device milliseconds per token; 0 without tokens."""
    return 1000 * (case.figures.device_s_per_token or 0.0)


def interval_words(mean: Interval) -> str:
    """A mean and its interval."""
    if mean.low is None or mean.high is None:
        return number(mean.value)
    return f"{number(mean.value)} ({number(mean.low)} to {number(mean.high)})"


def _cost_words(case: RunStatistics) -> str:
    return f"{number(nfe_cost(case))} NFE and {number(device_cost(case))} ms per token"


def _bounds(mean: Interval) -> tuple[float, float]:
    return (mean.value if mean.low is None else mean.low), (mean.value if mean.high is None else mean.high)


def _point(axes: Axes, x: float, y: float, style: Style, label: str) -> None:
    look: Any = {"fillstyle": style.filled, "markerfacecoloralt": "white"}
    axes.plot([x], [y], style.marker, color=style.colour, markersize=7, linestyle="", label=label, **look)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.margins(x=0.12, y=0.15)


# ---- acceptance


def acceptance_plot(cases: Sequence[RunStatistics]) -> Plot | None:
    """Tokens committed per iteration: the histogram, and the share of iterations that got at least that far."""
    shown = [case for case in cases if case.accept_hist.sum()]
    if not shown or all(case.run.plan.spec.task.kind == "score" for case in cases):
        return None
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = _axes(3.2, columns=2)
    widest = max(len(case.accept_hist) for case in shown)
    for place, (case, style) in enumerate(zip(shown, styles_of(shown), strict=True)):
        look: Any = {"color": style.colour, "linestyle": style.line, "marker": style.marker if widest <= 40 else None}
        shares = case.accept_hist / case.accept_hist.sum()
        committed = np.arange(len(shares))
        if len(shown) == 1 and widest <= 60:
            left.bar(committed, shares, color=style.colour, width=0.8)
        else:
            left.plot(committed, shares, **look)
        reached = at_least(case.accept_hist)
        label = case.figures.name if place < PANELS else None
        right.plot(np.arange(1, len(reached) + 1), reached, label=label, **look)
    left.set(title="tokens committed per iteration", xlabel="tokens", ylabel="share of iterations")
    right.set(
        title="acceptance by position", xlabel="position j in the iteration", ylabel="share that committed j or more"
    )
    for axes in (left, right):
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(shown) > 1:
        _legend_below(figure, right)
    caption = (
        "Right: the share of iterations that committed at least j tokens. Where an iteration commits the accepted drafts and "
        "one more token, that is how often the draft at position j - 1 was accepted together with all before it."
    )
    words = [
        f"{number(case.figures.tokens_per_iteration)} tokens per iteration, position 1 to 4: "
        + ", ".join(f"{share:.0%}" for share in at_least(case.accept_hist)[:4])
        for case in shown
    ]
    return _plot(figure, "Tokens per iteration", caption, shown, words)


# ---- effort and length


def length_plot(cases: Sequence[RunStatistics]) -> Plot | None:
    """NFE of a sample against its new tokens: a panel per case, all with the same axes; hexagons where points are many."""
    shown = [case for case in cases if len(case.nfe_M)]
    if not shown:
        return None
    left_out, shown = len(shown) - PANELS, shown[:PANELS]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, grid = _axes(3.4 if rows == 1 else 2.4 * rows, columns=columns, rows=rows)
    points = [(case.new_tokens_M, case.nfe_M) for case in shown]
    width, height = (1.05 * max(float(pair[axis].max()) for pair in points) or 1.0 for axis in (0, 1))
    hexagons = {"extent": (0.0, width, 0.0, height), "gridsize": (54, 12) if columns == 1 else (24, 12)}
    for case, (x, y), axes, style in zip(shown, points, grid, styles_of(shown), strict=False):
        _cloud(axes, x, y, style.colour, **hexagons)
        axes.plot([0, min(width, height)], [0, min(width, height)], color="#555555", linestyle="--", linewidth=0.9)
        if len(shown) > 1:
            axes.set_title(wrap_name(case.figures.name, PANEL_LETTERS // columns))
        axes.set(xlim=(0, width), ylim=(0, height), xlabel="new tokens", ylabel="NFE")
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    caption = "Forwards in which a sample took part, against the tokens generated for it. On the dashed line a sample took one "
    caption += "forward per token."
    if any(len(x) > SCATTER_UP_TO for x, _ in points):
        caption += " Darker hexagons hold more samples (logarithmic)."
    if (every := max(case.every for case in shown)) > 1:
        caption += f" Shown is one sample in {every:,}, evenly spaced."
    if left_out > 0:
        caption += f" {left_out} more cases are not drawn."
    words = [
        f"{x.min():,} to {x.max():,} new tokens, {y.min():,} to {y.max():,} NFE, on average {number(float(y.mean()))}"
        for x, y in points
    ]
    return _plot(figure, "NFE against length", caption, shown, words)


def _cloud(axes: Axes, x: NDArray[Any], y: NDArray[Any], colour: str, **hexagons: Any) -> None:
    if len(x) <= SCATTER_UP_TO:
        size = 6.5 if len(x) <= 200 else 3.5
        axes.plot(x, y, ".", color=colour, markersize=size, alpha=0.6, markeredgewidth=0)
        return
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["#e9e9e9", colour])
    axes.hexbin(x, y, bins="log", mincnt=1, cmap=shades, linewidths=0.1, **hexagons)


# ---- time


def course_plot(cases: Sequence[RunStatistics]) -> Plot | None:
    """Tokens per second and samples in slots over time."""
    shown = [(case, case.course if len(cases) == 1 else coarser(case.course)) for case in cases if case.course]
    if not shown:
        return None
    figure, (left, right) = _axes(3.0, columns=2)
    unit, seconds = time_unit(max(course.edges_s[-1] for _, course in shown))
    for (case, course), style in zip(shown, styles_of([case for case, _ in shown]), strict=True):
        for axes, values in ((left, course.tokens_per_s), (right, course.active)):
            edges = course.edges_s / seconds
            axes.stairs(values, edges, color=style.colour, linestyle=style.line, label=case.figures.name, linewidth=1.3)
            for moment in course.resumed_s:
                axes.axvline(moment / seconds, color="#999999", linestyle=":", linewidth=1)
    for axes, title in ((left, "tokens per second"), (right, "samples in a slot")):
        axes.set(title=title, xlabel=f"{unit} of decoding")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    if len(shown) > 1:
        _legend_below(figure, right)
    resumed = sum(len(course.resumed_s) for _, course in shown)
    caption = "The tokens of a sample are spread evenly over its time in a slot. " + (
        "Dotted lines: pauses without any sample, which are cut out." if resumed else "There was no pause in decoding."
    )
    words = [
        f"{number(course.edges_s[-1])} seconds, at most {number(float(course.tokens_per_s.max()))} tokens per second, "
        f"{number(float(course.active.mean()))} samples in a slot on average"
        for _, course in shown
    ]
    return _plot(figure, "Throughput and active slots over time", caption, [case for case, _ in shown], words)


def coarser(course: Course) -> Course:
    """The same course in at most MANY_BINS bins, for plots with several lines."""
    step = -(-len(course.active) // MANY_BINS)
    starts = np.arange(0, len(course.active), step)
    edges = np.append(course.edges_s[starts], course.edges_s[-1])
    widths = np.diff(np.append(starts, len(course.active)))
    tokens, active = (np.add.reduceat(values, starts) / widths for values in (course.tokens_per_s, course.active))
    return Course(edges, tokens, active, course.resumed_s)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis that long, and its seconds."""
    for name, length in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * length:
            return name, length
    return "seconds", 1.0


TIMES: Final = {"wait_s": "wait for a slot", "resident_s": "time in a slot", "device_s": "device time"}


def times_plot(cases: Sequence[RunStatistics]) -> Plot | None:
    """How long samples waited for a slot, were in it, and used the device: histograms for one case, boxes for several."""
    shown = [case for case in cases if any(len(case.spreads[name].counts) for name in TIMES)]
    if not shown:
        return None
    names = [name for name in TIMES if any(len(case.spreads[name].counts) for case in shown)]
    figure, grid = _axes(2.7 if len(shown) == 1 else _rows_height(shown), columns=len(names), share_y=len(shown) > 1)
    for name, axes in zip(names, grid, strict=True):
        if len(shown) == 1:
            _histogram(axes, shown[0].spreads[name], styles_of(shown)[0])
        else:
            _boxes(axes, [case.spreads[name] for case in shown], styles_of(shown))
        axes.set(title=TIMES[name], xlabel="seconds")
    caption = "Seconds per sample. Device time is the sample's share of its forwards."
    if len(shown) > 1:
        grid[0].set_yticks(range(len(shown)), [wrap_name(case.figures.name, TICK_LETTERS) for case in shown])
        grid[0].invert_yaxis()
        caption += " Boxes go from the first to the third quartile, with the median; lines from 5 % to 95 %."
    else:
        grid[0].set_ylabel("samples")
        zeros = sum(shown[0].spreads[name].num_zero for name in names)
        caption += f" {zeros:,} values of 0 are not on the logarithmic axes." if zeros else ""
    quantiles = [[(TIMES[name], case.spreads[name].quantiles) for name in names] for case in shown]
    words = [
        ", ".join(f"{title} median {number(values[2])} s, 95 % below {number(values[4])}" for title, values in of_case)
        for of_case in quantiles
    ]
    return _plot(figure, "Wait and decode times", caption, shown, words)


def _rows_height(cases: Sequence[RunStatistics]) -> float:
    """Inches for a row per case, whose names may take several lines."""
    return 1.2 + sum(0.12 + 0.14 * len(wrap_name(case.figures.name, TICK_LETTERS).splitlines()) for case in cases)


def _histogram(axes: Axes, spread: Spread, style: Style) -> None:
    if not len(spread.counts):
        return
    axes.stairs(spread.counts, spread.edges, fill=True, color=style.colour)
    _scale(axes, is_log=spread.log)


def _boxes(axes: Axes, spreads: Sequence[Spread], styles: Sequence[Style]) -> None:
    for place, (spread, style) in enumerate(zip(spreads, styles, strict=True)):
        low, first, middle, third, high = spread.quantiles
        axes.plot([low, high], [place, place], color=style.colour, linewidth=1.2)
        axes.barh(place, third - first, 0.5, left=first, color=style.colour, alpha=0.55)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color="#111111", linewidth=1.6)
    lows, highs = [spread.quantiles[0] for spread in spreads], [spread.quantiles[-1] for spread in spreads]
    _scale(axes, is_log=min(lows) > 0 and max(highs) > WIDE * min(lows))
    axes.grid(visible=False, axis="y")


def _scale(axes: Axes, *, is_log: bool) -> None:
    """A time axis from 0, or a logarithmic one whose ticks are plain numbers: 0.5, 20, 1,000."""
    if not is_log:
        axes.set_xlim(left=0)
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    few = high / max(low, 1e-12) < 300
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


# ---- shared parts


def _axes(
    height: float, *, columns: int = 1, rows: int = 1, share_y: bool | Literal["row"] = False
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(grid.ravel())


def _legend_below(figure: Figure, *of: Axes) -> None:
    """A legend under the plot, in as many columns as its longest name allows; the figure grows by its height."""
    handles = {label: handle for axes in of for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [wrap_name(label, 90) for label in handles]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(4, len(labels), int(POINTS_WIDE // (45 + LETTER * longest))))
    lines = -(-len(labels) // columns) * max(len(label.splitlines()) for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.19 * lines)
    figure.legend(list(handles.values()), labels, loc="outside lower center", ncols=columns, handlelength=2.6)


def wrap_name(name: str, width: int) -> str:
    """The name in lines of at most `width` characters, broken after spaces, hyphens and underscores where there are any."""
    lines = [""]
    for piece in re.findall(r"[^ _/-]*[ _/-]+|[^ _/-]+", name):
        for part in [piece[start : start + width] for start in range(0, len(piece), width)]:
            if len(lines[-1] + part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


# Colour and marker of each decoder, the same in every report. The baseline of each model family is grey. Within a family the
# others differ in hue and lightness, also for readers who do not see red and green as different, and each has a contrast of at
# least 3:1 on white.
LOOKS: Final = {
    "autoregressive": ("#4d4d4d", "o"),
    "any_subset": ("#5c5c5c", "o"),
    "stepwise": ("#6b6b6b", "o"),
    "block_diffusion": ("#565f6b", "o"),
    "speculative": ("#0072b2", "s"),
    "assd": ("#1f5fbf", "s"),
    "ssd": ("#0a6ea4", "s"),
    "s2d2": ("#3457d5", "s"),
    "specdiff": ("#c44e00", "^"),
    "parallel": ("#b8480f", "^"),
    "threshold": ("#a84300", "^"),
    "jacobi": ("#00775a", "D"),
    "factor": ("#8a5a00", "v"),
    "multiblock_jacobi": ("#7b3294", "P"),
    "ancestral": ("#8c2d72", "X"),
}
OTHER_LOOK: Final = ("#333333", "o")
LINES: Final = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
FILLED: Final = ("full", "none", "left", "bottom", "right", "top")


@dataclass(frozen=True, slots=True)
class Style:
    """How a case is drawn; `line` and the filled side of the marker tell apart cases of the same decoder."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    filled: str


def styles_of(cases: Sequence[RunStatistics]) -> list[Style]:
    """A style for each case."""
    counts: Counter[str] = Counter()
    styles = []
    for case in cases:
        decoder = case.figures.decoder
        place = counts[decoder] % len(LINES)
        styles.append(Style(*LOOKS.get(decoder, OTHER_LOOK), LINES[place], FILLED[place]))
        counts[decoder] += 1
    return styles


# ---- a figure as SVG

FONTS: Final = "'DejaVu Sans', Verdana, Arial, sans-serif"

STYLE: Final = Path(__file__).parent / "report.mplstyle"

_SURPLUS = re.compile(
    r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*|\s*<metadata>.*?</metadata>|\s*<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>",
    re.DOTALL,
)
"""What a drawing inside a page does not need."""


@contextmanager
def plotting() -> Iterator[None]:
    """Inside, figures are made in STYLE. UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the plots of a report need matplotlib: pip install 'draftmill[report]'") from None
    with matplotlib.rc_context(fname=STYLE):
        yield


def inline_svg(plot: Plot, name: str) -> str:
    """The figure as an <svg> element; `name` is a prefix of its ids, unique in the page.

    Screen readers get the title and the description in the place of the drawing.
    """
    out = io.StringIO()
    plot.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = _SURPLUS.sub("", out.getvalue())
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", text)
    text = re.sub(r"font: ([^;\"]*?) ?'DejaVu Sans'[^;\"]*", rf"font: \1 {FONTS}", text)
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None, "matplotlib writes a viewBox"
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(plot.title)}</title>'
        f'<desc id="{name}-desc">{html.escape(plot.description)}</desc>'
        f"{_rename_ids(body, name).rstrip()}"
    )


def _rename_ids(body: str, name: str) -> str:
    """Keep the ids that something refers to, under the figure's own prefix; drop the others."""
    used = set(re.findall(r'href="#([^"]+)"', body)) | set(re.findall(r"url\(#([^)]+)\)", body))
    body = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", body)
    body = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    return re.sub(r"\n\s*", "\n", body)
