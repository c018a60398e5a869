"""The plots of a report: matplotlib figures of one run or of several cases, each with a caption and a description in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from draftmill.jobs.analysis.case import WIDE, Case, Course, Spread, at_least
from draftmill.jobs.analysis.compare import number
from draftmill.jobs.analysis.statistics import LEVEL, Interval

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
ERROR_PANELS: Final = 4
MANY_BINS: Final = 24
LOWER_IS_BETTER: Final = ("perplexity", "bits_per_byte")
HIGHER_IS_BETTER: Final = ("acc", "bleu", "chrf", "edit_similarity", "is_greedy", "logprob", "pass", "rouge")
"""Metrics whose better end is known: by a part of their name, or by its beginning. Only those get a frontier."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure, what it shows (`title`, `caption`), and what can be seen in it, in words (`description`)."""

    figure: Figure
    title: str
    caption: str
    description: str


def quality_plots(cases: Sequence[Case], names: Sequence[str]) -> list[Plot]:
    """Each metric against NFE and device seconds per token: a point per case, with the interval of its mean."""
    return [plot for name in names if (plot := _quality(cases, name)) is not None]


def _quality(cases: Sequence[Case], name: str) -> Plot | None:
    shown = [case for case in cases if name in case.metrics and case.figures.nfe_per_token]
    if not shown:
        return None
    figure, (left, right) = _axes(3.4, columns=2, share_y=True)
    styles = dict(zip([case.figures.name for case in cases], styles_of(_decoders(cases)), strict=True))
    for axes, label, cost in ((left, "NFE per token", nfe_cost), (right, "device ms per token", device_cost)):
        points = [(cost(case), case.metrics[name], case) for case in shown]
        _frontier(axes, [(x, mean.value) for x, mean, _ in points], better(name))
        for x, mean, case in points:
            style = styles[case.figures.name]
            low, high = _bounds(mean)
            axes.plot([x, x], [low, high], color=style.colour, linewidth=1.2)
            _point(axes, x, mean.value, style, case.figures.name)
        axes.set_xlabel(label)
        axes.margins(x=0.12, y=0.15)
    _legend_below(figure, right)
    left.set_ylabel(name)
    listed = "; ".join(
        f"{case.figures.name}: {name} {interval_words(case.metrics[name])} at {number(nfe_cost(case))} NFE and "
        f"{number(device_cost(case))} ms per token"
        for case in shown
    )
    line = " The grey line joins the cases that no other case beats at equal or lower cost." if better(name) else ""
    caption = f"Mean of {name} over the samples; vertical lines are {LEVEL:.0%} intervals.{line}"
    return Plot(figure, f"{name} against cost", caption, listed)


def cost_plot(cases: Sequence[Case]) -> Plot | None:
    """NFE per token against device time per token, a point per case."""
    shown = [case for case in cases if case.figures.nfe_per_token and case.figures.device_s_per_token]
    if len(shown) < 2:
        return None
    figure, (axes,) = _axes(3.2)
    for case, style in zip(shown, styles_of(_decoders(shown)), strict=True):
        _point(axes, nfe_cost(case), device_cost(case), style, case.figures.name)
    axes.set_xlabel("NFE per token")
    axes.set_ylabel("device ms per token")
    axes.margins(x=0.12, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend_below(figure, axes)
    listed = "; ".join(
        f"{case.figures.name}: {number(nfe_cost(case))} NFE, {number(device_cost(case))} ms" for case in shown
    )
    caption = (
        "Fewer forwards per token mean less time only as far as a forward with drafts costs as much as one without."
    )
    return Plot(figure, "Forwards and device time per token", caption, listed)


def acceptance_plot(cases: Sequence[Case]) -> Plot | None:
    """Tokens committed per iteration: the histogram, and the share of iterations that got at least that far."""
    shown = [case for case in cases if case.accept_hist.sum()]
    if not shown:
        return None
    figure, (left, right) = _axes(3.2, columns=2)
    styles = styles_of(_decoders(shown))
    widest = max(len(case.accept_hist) for case in shown)
    for number_, (case, style) in enumerate(zip(shown, styles, strict=True)):
        shares = case.accept_hist / case.accept_hist.sum()
        committed = np.arange(len(shares))
        if len(shown) == 1 and widest <= 60:
            left.bar(committed, shares, color=style.colour, width=0.8)
        else:
            left.plot(committed, shares, color=style.colour, linestyle=style.line, marker=_marker(style, widest))
        reached = at_least(case.accept_hist)
        place = np.arange(1, len(reached) + 1)
        label = case.figures.name if number_ < PANELS else None
        right.plot(place, reached, color=style.colour, linestyle=style.line, marker=_marker(style, widest), label=label)
    left.set_title("tokens committed per iteration")
    left.set_xlabel("tokens")
    left.set_ylabel("share of iterations")
    right.set_title("acceptance by position")
    right.set_xlabel("position j in the iteration")
    right.set_ylabel("share that committed j or more")
    for axes in (left, right):
        axes.set_ylim(0, 1.03)
        _whole_numbers(axes)
    if len(shown) > 1:
        _legend_below(figure, right)
    listed = "; ".join(
        f"{case.figures.name}: {number(case.figures.tokens_per_iteration)} tokens per iteration, position 1 to 4: "
        + ", ".join(f"{share:.0%}" for share in at_least(case.accept_hist)[:4])
        for case in shown
    )
    caption = (
        "Right: the share of iterations that committed at least j tokens. Where an iteration commits the accepted drafts and "
        "one more token, that is how often the draft at position j - 1 was accepted together with all before it."
    )
    return Plot(figure, "Tokens per iteration", caption, listed)


def length_plot(cases: Sequence[Case]) -> Plot | None:
    """NFE of a sample against the tokens that it got: one panel per case."""
    return _panels(
        cases,
        lambda case: (case.points.new_tokens, case.points.nfe),
        ("new tokens", "NFE"),
        "NFE against length",
        "Forwards in which a sample took part, against the tokens generated for it. On the dashed line a sample took one "
        "forward per token.",
        diagonal=True,
    )


def mask_plot(cases: Sequence[Case]) -> Plot | None:
    """NFE per token against the masked share of the canvas, for infilling with masks of different sizes."""
    varied = [case for case in cases if case.run.plan.spec.task.kind == "infill" and np.ptp(_masked(case)) > 0.02]
    if not varied:
        return None
    return _panels(
        varied,
        lambda case: (_masked(case), case.points.nfe / np.maximum(case.points.new_tokens, 1)),
        ("masked share of the canvas", "NFE per token"),
        "NFE against the masked share",
        "Forwards per generated token, against the share of a sample's canvas that was masked.",
    )


def course_plot(cases: Sequence[Case]) -> Plot | None:
    """Tokens per second and samples in slots over time."""
    shown = [(case, case.course if len(cases) == 1 else coarser(case.course)) for case in cases if case.course]
    if not shown:
        return None
    figure, (left, right) = _axes(3.0, columns=2)
    unit, seconds = time_unit(max(course.edges_s[-1] for _, course in shown))
    for (case, course), style in zip(shown, styles_of(_decoders([case for case, _ in shown])), strict=True):
        for axes, values in ((left, course.tokens_per_s), (right, course.active)):
            edges = course.edges_s / seconds
            axes.stairs(values, edges, color=style.colour, linestyle=style.line, label=case.figures.name, linewidth=1.3)
            for moment in course.resumed_s:
                axes.axvline(moment / seconds, color="#999999", linestyle=":", linewidth=1)
    for axes, title in ((left, "tokens per second"), (right, "samples in a slot")):
        axes.set_title(title)
        axes.set_xlabel(f"{unit} of decoding")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    if len(shown) > 1:
        _legend_below(figure, right)
    resumed = sum(len(course.resumed_s) for _, course in shown)
    caption = "The tokens of a sample are spread evenly over its time in a slot. " + (
        "Dotted lines: pauses without any sample, which are cut out." if resumed else "There was no pause in decoding."
    )
    listed = "; ".join(f"{case.figures.name}: {_course_words(course)}" for case, course in shown)
    return Plot(figure, "Throughput and active slots over time", caption, listed)


def times_plot(cases: Sequence[Case]) -> Plot | None:
    """How long samples waited for a slot, were in it, and used the device."""
    names = {"wait_s": "wait for a slot", "resident_s": "time in a slot", "device_s": "device time"}
    caption = "Seconds per sample. Device time is the sample's share of its forwards."
    return _spreads(cases, names, "Wait and decode times", "seconds", caption)


def sizes_plot(cases: Sequence[Case]) -> Plot | None:
    """Lengths of prompts and of generated texts."""
    names = {"prompt_tokens": "given tokens", "new_tokens": "new tokens"}
    return _spreads(cases, names, "Given and new tokens", "tokens", "Tokens per sample.")


def errors_plot(cases: Sequence[Case]) -> Plot | None:
    """Failed samples by class: a bar per class for one case; for several cases a panel per class with a bar per case."""
    totals: Counter[str] = sum((Counter(case.errors) for case in cases), Counter())
    kinds = [kind for kind, _ in sorted(totals.items(), key=lambda item: (-item[1], item[0]))]
    if not kinds:
        return None
    styles, caption = styles_of(_decoders(cases)), "Samples that failed, by the class of their error."
    if len(cases) == 1:
        figure, grid = _axes(0.9 + 0.3 * len(kinds))
        _bars(grid[0], kinds, [totals[kind] for kind in kinds], [styles[0].colour] * len(kinds))
    else:
        drawn = kinds[:ERROR_PANELS]
        figure, grid = _axes(_rows_height(cases), columns=len(drawn), share_y=True)
        for kind, axes in zip(drawn, grid, strict=True):
            counts = [case.errors.get(kind, 0) for case in cases]
            _bars(
                axes,
                [wrapped(case.figures.name, TICK_LETTERS) for case in cases],
                counts,
                [style.colour for style in styles],
            )
            axes.set_title(kind)
        if len(kinds) > len(drawn):
            caption += f" The table has {len(kinds) - len(drawn)} more classes."
    grid[0].invert_yaxis()
    for axes in grid:
        axes.set_xlabel("failed samples")
    listed = "; ".join(
        f"{case.figures.name}: " + ", ".join(f"{count:,} {kind}" for kind, count in case.errors.items())
        for case in cases
        if case.errors
    )
    return Plot(figure, "Errors by class", caption, listed)


def _rows_height(cases: Sequence[Case]) -> float:
    """Inches for a row per case, whose names may take several lines."""
    return 1.2 + sum(0.12 + 0.14 * len(wrapped(case.figures.name, TICK_LETTERS).splitlines()) for case in cases)


def _bars(axes: Axes, names: Sequence[str], counts: Sequence[int], colours: Sequence[str]) -> None:
    bars = axes.barh(range(len(names)), counts, 0.6, color=colours)
    axes.bar_label(bars, [f"{count:,}" if count else "" for count in counts], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    _whole_numbers(axes)


# ---- shared parts


def better(name: str) -> int:
    """1 if more of a metric is better, -1 if less is, 0 if unknown."""
    if any(part in name for part in LOWER_IS_BETTER):
        return -1
    return 1 if "match" in name or name.startswith(HIGHER_IS_BETTER) else 0


def frontier(points: Sequence[tuple[float, float]], direction: int) -> list[tuple[float, float]]:
    """The points (cost, quality) that no other point beats at equal or lower cost, by cost; `direction` as in `better`."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -direction * point[1])):
        if not best or direction * quality > direction * best[-1][1]:
            best.append((cost, quality))
    return best


def nfe_cost(case: Case) -> float:
    """NFE per token; 0 without tokens."""
    return case.figures.nfe_per_token or 0.0


def device_cost(case: Case) -> float:
    """Device milliseconds per token; 0 without tokens."""
    return 1000 * (case.figures.device_s_per_token or 0.0)


def interval_words(mean: Interval) -> str:
    """A mean and its interval."""
    if mean.low is None or mean.high is None:
        return number(mean.value)
    return f"{number(mean.value)} ({number(mean.low)} to {number(mean.high)})"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis that long, and its seconds."""
    for name, length in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 3 * length:
            return name, length
    return "seconds", 1.0


def _axes(height: float, *, columns: int = 1, rows: int = 1, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(grid.ravel())


def _decoders(cases: Sequence[Case]) -> list[str]:
    return [case.figures.decoder for case in cases]


def _bounds(mean: Interval) -> tuple[float, float]:
    low, high = mean.low, mean.high
    return (mean.value if low is None else low), (mean.value if high is None else high)


def _point(axes: Axes, x: float, y: float, style: Style, label: str) -> None:
    look: Any = {"fillstyle": style.filled, "markerfacecoloralt": "white"}
    axes.plot([x], [y], style.marker, color=style.colour, markersize=7, linestyle="", label=label, **look)


def _frontier(axes: Axes, points: Sequence[tuple[float, float]], direction: int) -> None:
    best = frontier(points, direction) if direction else []
    if len(best) > 1:
        axes.plot(*zip(*best, strict=True), color="#aaaaaa", linewidth=1.2, zorder=1)


def _legend_below(figure: Figure, axes: Axes) -> None:
    """A legend under the plot, in as many columns as its longest name allows; the figure grows by its height."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [wrapped(label, 90) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(4, len(labels), int(POINTS_WIDE // (45 + LETTER * longest))))
    lines = -(-len(labels) // columns) * max(len(label.splitlines()) for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.19 * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)


def wrapped(name: str, width: int) -> str:
    """The name in lines of at most `width` characters, broken after spaces, hyphens and underscores where there are any."""
    lines = [""]
    for piece in re.findall(r"[^ _/-]*[ _/-]+|[^ _/-]+", name):
        for part in [piece[start : start + width] for start in range(0, len(piece), width)]:
            if len(lines[-1] + part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _marker(style: Style, positions: int) -> str | None:
    return style.marker if positions <= 40 else None


def _masked(case: Case) -> NDArray[np.float64]:
    total = np.maximum(case.points.new_tokens + case.points.prompt_tokens, 1)
    return np.asarray(case.points.new_tokens / total, np.float64) if len(total) else np.zeros(1)


def _panels(
    cases: Sequence[Case],
    values: Callable[[Case], tuple[NDArray[Any], NDArray[Any]]],
    labels: tuple[str, str],
    title: str,
    caption: str,
    *,
    diagonal: bool = False,
) -> Plot | None:
    """Points of samples, one panel per case, all with the same axes; hexagons where there are many."""
    shown = [case for case in cases if len(case.points.nfe)]
    if not shown:
        return None
    left_out, shown = len(shown) - PANELS, shown[:PANELS]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, grid = _axes(3.4 if rows == 1 else 2.4 * rows, columns=columns, rows=rows)
    pairs = [values(case) for case in shown]
    limits = [1.05 * max(float(pair[axis].max()) for pair in pairs) for axis in (0, 1)]
    crowded = any(len(pair[0]) > SCATTER_UP_TO for pair in pairs)
    for case, (x, y), axes, style in zip(shown, pairs, grid, styles_of(_decoders(shown)), strict=False):
        extent = (0.0, limits[0] or 1.0, 0.0, limits[1] or 1.0)
        _cloud(axes, x, y, style, extent, cells=(54, 12) if columns == 1 else (24, 12))
        if diagonal:
            axes.plot([0, min(limits)], [0, min(limits)], color="#555555", linestyle="--", linewidth=0.9)
        if len(shown) > 1:
            axes.set_title(wrapped(case.figures.name, PANEL_LETTERS // columns))
        axes.set_xlim(0, limits[0] or 1.0)
        axes.set_ylim(0, limits[1] or 1.0)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    caption += " Darker hexagons hold more samples (logarithmic)." if crowded else ""
    parts = [case for case in shown if case.every > 1]
    if parts:
        caption += f" Shown is one sample in {max(case.every for case in parts):,}, evenly spaced."
    if left_out > 0:
        caption += f" {left_out} more cases are not drawn."
    listed = "; ".join(
        f"{case.figures.name}: {labels[0]} from {number(float(x.min()))} to {number(float(x.max()))}, "
        f"{labels[1]} from {number(float(y.min()))} to {number(float(y.max()))}, on average {number(float(y.mean()))}"
        for case, (x, y) in zip(shown, pairs, strict=True)
    )
    return Plot(figure, title, caption, listed)


def _cloud(
    axes: Axes,
    x: NDArray[Any],
    y: NDArray[Any],
    style: Style,
    extent: tuple[float, float, float, float],
    *,
    cells: tuple[int, int],
) -> None:
    if len(x) <= SCATTER_UP_TO:
        size = 6.5 if len(x) <= 200 else 3.5
        axes.plot(x, y, ".", color=style.colour, markersize=size, alpha=0.6, markeredgewidth=0)
        return
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", ["#e9e9e9", style.colour])
    axes.hexbin(x, y, gridsize=cells, extent=extent, bins="log", mincnt=1, cmap=shades, linewidths=0.1)


def coarser(course: Course) -> Course:
    """The same course in at most MANY_BINS bins, for plots with several lines."""
    step = -(-len(course.active) // MANY_BINS)
    starts = np.arange(0, len(course.active), step)
    edges = np.append(course.edges_s[starts], course.edges_s[-1])
    widths = np.diff(np.append(starts, len(course.active)))
    tokens, active = (np.add.reduceat(values, starts) / widths for values in (course.tokens_per_s, course.active))
    return Course(edges, tokens, active, course.resumed_s)


def _course_words(course: Course) -> str:
    return (
        f"{number(course.edges_s[-1])} seconds, at most {number(float(course.tokens_per_s.max()))} tokens per second, "
        f"{number(float(course.active.mean()))} samples in a slot on average"
    )


def _spreads(cases: Sequence[Case], names: dict[str, str], title: str, unit: str, caption: str) -> Plot | None:
    """Histograms side by side for one case, boxes of quantiles for several."""
    shown = [case for case in cases if any(len(case.spreads[name].counts) for name in names)]
    if not shown:
        return None
    present = [name for name in names if any(len(case.spreads[name].counts) for case in shown)]
    height = 2.7 if len(shown) == 1 else _rows_height(shown)
    figure, grid = _axes(height, columns=len(present), share_y=len(shown) > 1)
    styles = styles_of(_decoders(shown))
    for name, axes in zip(present, grid, strict=True):
        if len(shown) == 1:
            _histogram(axes, shown[0].spreads[name], styles[0])
        else:
            _boxes(axes, [case.spreads[name] for case in shown], styles)
        axes.set_title(names[name])
        axes.set_xlabel(unit)
    if len(shown) > 1:
        grid[0].set_yticks(range(len(shown)), [wrapped(case.figures.name, TICK_LETTERS) for case in shown])
        grid[0].invert_yaxis()
        caption += " Boxes go from the first to the third quartile, with the median; lines from 5 % to 95 %."
    else:
        grid[0].set_ylabel("samples")
        zeros = sum(case.spreads[name].num_zero for case in shown for name in present)
        caption += f" {zeros:,} values of 0 are not on the logarithmic axes." if zeros else ""
    listed = "; ".join(
        f"{case.figures.name}, {names[name]}: median {number(case.spreads[name].quantiles[2])} {unit}, "
        f"95 % below {number(case.spreads[name].quantiles[4])}"
        for case in shown
        for name in present
    )
    return Plot(figure, title, caption, listed)


def _histogram(axes: Axes, spread: Spread, style: Style) -> None:
    if not len(spread.counts):
        return
    axes.stairs(spread.counts, spread.edges, fill=True, color=style.colour)
    if spread.log:
        axes.set_xscale("log")
        _plain_ticks(axes)
    else:
        axes.set_xlim(left=0)


def _boxes(axes: Axes, spreads: Sequence[Spread], styles: Sequence[Style]) -> None:
    for place, (spread, style) in enumerate(zip(spreads, styles, strict=True)):
        low, first, middle, third, high = spread.quantiles
        axes.plot([low, high], [place, place], color=style.colour, linewidth=1.2)
        axes.barh(place, third - first, 0.5, left=first, color=style.colour, alpha=0.55)
        axes.plot([middle, middle], [place - 0.3, place + 0.3], color="#111111", linewidth=1.6)
    lows, highs = [spread.quantiles[0] for spread in spreads], [spread.quantiles[-1] for spread in spreads]
    if min(lows) > 0 and max(highs) > WIDE * min(lows):
        axes.set_xscale("log")
        _plain_ticks(axes)
    else:
        axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")


def _plain_ticks(axes: Axes) -> None:
    """Ticks of a logarithmic axis as plain numbers: 0.5, 20, 1,000."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    few = high / max(low, 1e-12) < 300
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


# The same in every report. The baseline of each model family is grey. Within a family the others differ in hue and lightness,
# also for readers who do not see red and green as different, and each has a contrast of at least 3:1 on white.
COLOURS: Final = {
    "autoregressive": "#4d4d4d",
    "any_subset": "#5c5c5c",
    "stepwise": "#6b6b6b",
    "block_diffusion": "#565f6b",
    "speculative": "#0072b2",
    "assd": "#1f5fbf",
    "ssd": "#0a6ea4",
    "s2d2": "#3457d5",
    "specdiff": "#c44e00",
    "parallel": "#b8480f",
    "threshold": "#a84300",
    "jacobi": "#00775a",
    "factor": "#8a5a00",
    "multiblock_jacobi": "#7b3294",
    "ancestral": "#8c2d72",
}
MARKERS: Final = {
    "autoregressive": "o",
    "any_subset": "o",
    "stepwise": "o",
    "block_diffusion": "o",
    "speculative": "s",
    "assd": "s",
    "ssd": "s",
    "s2d2": "s",
    "specdiff": "^",
    "parallel": "^",
    "threshold": "^",
    "jacobi": "D",
    "factor": "v",
    "multiblock_jacobi": "P",
    "ancestral": "X",
}
OTHER_COLOUR: Final = "#333333"
LINES: Final = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))

FILLED: Final = ("full", "none", "left", "bottom", "right", "top")


@dataclass(frozen=True, slots=True)
class Style:
    """How a case is drawn; `line` and the filled side of the marker tell apart cases of the same decoder."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    filled: str = "full"


def styles_of(decoders: Sequence[str]) -> list[Style]:
    """A style for each case, given its decoder."""
    seen: Counter[str] = Counter()
    found = []
    for decoder in decoders:
        number = seen[decoder] % len(LINES)
        look = COLOURS.get(decoder, OTHER_COLOUR), MARKERS.get(decoder, "o"), LINES[number], FILLED[number]
        found.append(Style(*look))
        seen[decoder] += 1
    return found
