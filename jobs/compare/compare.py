"""`draftmill compare`: compares finished runs of the same samples, pair by pair, with a baseline. Writes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, Literal

from draftmill.jobs.compare.comparison import (
    Comparison,
    Comparisons,
    MetricFigure,
    RatioFigure,
    RunFigures,
    compare_runs,
)
from draftmill.jobs.compare.runs import find_runs
from draftmill.jobs.compare.statistics import ALPHA, LEVEL, MIN_ROWS, Interval
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted, table_lines
from draftmill.storage.errors import printable
from draftmill.storage.stores.store import Place

Table = list[list[str]]
"""A header and rows of cells."""

RATIO_LABELS: Final = {
    "nfe": "NFE",
    "nfe_draft": "draft NFE",
    "tokens": "tokens",
    "nfe_per_token": "NFE per token",
    "device_s_per_token": "device seconds per token",
}
RUN_LABELS: Final = {
    "samples": "samples",
    "failed": "failed",
    "tokens": "tokens",
    "nfe_per_token": "NFE per token",
    "nfe_draft_per_token": "draft NFE per token",
    "device_s_per_token": "device ms per token",
    "tokens_per_iteration": "tokens per iteration",
    "acceptance": "acceptance",
}
HOW: Final = (
    f'[low, high]: {LEVEL:.0%} Student t interval over rows. "not distinguishable": the interval '
    f"contains no change, or p >= {ALPHA}. No correction is made for the number of figures."
)


def as_text(comparisons: Comparisons) -> str:
    parts = ["\n".join([f"runs{_baseline_text(comparisons)}", *table_lines(runs_table(comparisons.runs))])]
    for comparison in comparisons.against:
        lines = [line for table in comparison_tables(comparison) for line in table_lines(table)]
        parts.append("\n".join([heading(comparison), *lines, *(f"  {remark}" for remark in remarks(comparison))]))
    return printable("\n\n".join([*parts, "\n".join(notes(comparisons))])) + "\n"


def as_markdown(comparisons: Comparisons) -> str:
    parts = [f"### Runs{_escape(_baseline_text(comparisons))}", _markdown(runs_table(comparisons.runs))]
    for comparison in comparisons.against:
        title, counts = heading(comparison).split(": ", 1)
        parts += [f"### {_escape(title)}", f"{_escape(counts)}."]
        parts += [*map(_markdown, comparison_tables(comparison)), *(f"{_escape(one)}." for one in remarks(comparison))]
    return printable("\n\n".join([*parts, *(_escape(note) for note in notes(comparisons))])) + "\n"


def _baseline_text(comparisons: Comparisons) -> str:
    return f", the baseline is {comparisons.baselines[0]}" if len(comparisons.baselines) == 1 else ""


def as_data(comparisons: Comparisons) -> dict[str, Any]:
    """The comparison as JSON data; a figure that can't be computed is null."""
    return {
        "level": LEVEL,
        "alpha": ALPHA,
        "method": "Student t over rows",
        "baselines": comparisons.baselines,
        "runs": [_plain(asdict(run)) for run in comparisons.runs],
        "comparisons": [_comparison_data(comparison) for comparison in comparisons.against],
        "unfinished": list(comparisons.unfinished),
    }


def runs_table(runs: Sequence[RunFigures], *, with_metrics: bool = True) -> Table:
    """Each run's own figures, without columns that no run has."""
    names = [name for name in RUN_LABELS if any(getattr(run, name) for run in runs) or name in {"samples", "failed"}]
    metrics = sorted({name for run in runs for name in run.metrics}) if with_metrics else []
    rows = [["run", "decoder", *(RUN_LABELS[name] for name in names), *metrics]]
    for run in runs:
        cells = [_run_cell(name, getattr(run, name)) for name in names]
        cells += [number(run.metrics[name]) if name in run.metrics else "-" for name in metrics]
        rows.append([run.name, run.decoder, *cells])
    return rows


def comparison_tables(comparison: Comparison) -> list[Table]:
    """A run's figures against the baseline's, what the pairs are worth, and planned sizes; not those that `remarks` has."""
    tables = [_figures_table(comparison), _pairing_table(comparison), _sizes_table(comparison)]
    return [table for place, table in enumerate(tables) if place == 0 or len(table) > 1]


def _pairing_table(comparison: Comparison) -> Table:
    rows = [["pairs", "correlation", "change without pairs", "worth"]]
    for name, figure in comparison.metrics.items():
        pairing = figure.pairing
        if pairing.worth is not None and pairing.unpaired is not None:
            worth = f"{pairing.worth:,.1f} times the samples"
            within = ""
            if pairing.worth_of_noise is not None:
                within = f" (in a row {number(pairing.correlation_within)})"
                worth += f" (common noise alone: {pairing.worth_of_noise:,.1f})"
            correlation = f"{number(pairing.correlation)}{within}"
            rows.append([name, correlation, interval_text(pairing.unpaired).strip(), worth])
    return rows


def _sizes_table(comparison: Comparison) -> Table:
    rows: Table = []
    for name, figure in comparison.metrics.items():
        if (sizes := figure.sizes) is None:
            continue
        rows = rows or [[f"width {sizes.width:g}", "rows", "or samples a row, same rows"]]
        counts = ", ".join(f"{count:,} of {counted(samples, 'sample')}" for samples, count in sizes.rows.items())
        why = sizes.lacking or f"at best a width of {number(sizes.narrowest)}"
        rows.append([name, counts or "-", f"- ({why})" if sizes.samples is None else f"{sizes.samples:,}"])
    return rows


def _figures_table(comparison: Comparison) -> Table:
    rows, total = [["figure", "baseline", "run", "change", "verdict"]], comparison.pairs.num_compared
    if comparison.equal is not None:
        what = "equal texts" if comparison.equal_by == "text" else "equal texts (tokens)"
        share = f"{comparison.equal:,} of {total:,} ({comparison.equal / total:.1%})" if total else "0 of 0"
        rows.append([what, "", "", share, ""])
    ratios = {name: ratio for name, ratio in comparison.ratios.items() if ratio.verdict != "equal"}
    metrics = {name: metric for name, metric in comparison.metrics.items() if metric.verdict != "equal"}
    rows += [_ratio_row(RATIO_LABELS[name], ratio) for name, ratio in ratios.items()]
    return [*rows, *(_metric_row(name, metric, total) for name, metric in metrics.items())]


def remarks(comparison: Comparison) -> list[str]:
    """The figures that are equal in both runs, with their values, if there are any; and how many pairs have one noise."""
    noise, total = comparison.noise, comparison.pairs.num_compared
    shared = f"noise: common to {noise.pairs:,} of {counted(total, 'pair')}{f'; {noise.lost}' if noise.lost else ''}"
    if not noise.pairs:
        shared = f"noise: nothing is left of the coupling: {noise.lost or 'no pair is compared'}"
    ratios = [(RATIO_LABELS[name], _figure_text(ratio.run), ratio.verdict) for name, ratio in comparison.ratios.items()]
    metrics = [(name, number(metric.run), metric.verdict) for name, metric in comparison.metrics.items()]
    equal = [f"{label} ({text})" for label, text, verdict in (*ratios, *metrics) if verdict == "equal"]
    return [*([f"equal in both: {', '.join(equal)}"] if equal else []), shared]


def notes(comparisons: Comparisons) -> list[str]:
    """How to read the figures, and what they don't cover."""
    lines = [HOW]
    if any(comparison.pairs.clustered for comparison in comparisons.against):
        lines.append("Rows have several samples: intervals and tests take rows as units, with all their samples.")
    if any(comparison.pairs.num_rows < MIN_ROWS for comparison in comparisons.against):
        lines.append(f"Fewer than {MIN_ROWS} rows in a comparison: its intervals may be too narrow.")
    if comparisons.unfinished:
        lines.append(f"Not finished, and skipped: {', '.join(comparisons.unfinished)}.")
    return lines


def heading(comparison: Comparison) -> str:
    """What is compared with what, how many pairs there are, and what has none."""
    pairs = comparison.pairs
    failed = pairs.failed_first, pairs.failed_second, pairs.failed_both
    split = " ({:,} in the baseline, {:,} in the run, {:,} in both)".format(*failed) if any(failed) else ""
    return (
        f"{comparison.run} against {comparison.baseline}: {pairs.both:,} pairs, "
        f"{pairs.only_first:,} only in the baseline, {pairs.only_second:,} only in the run; "
        f"{sum(failed):,} failed{split}, {pairs.num_compared:,} compared"
    )


def number(value: float | None) -> str:
    """A figure with four significant digits."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        digits = 4 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{min(digits, 6)}f}"
    return f"{value:.3e}"


def interval_text(interval: Interval) -> str:
    """[low, high]; empty without bounds."""
    return f" [{', '.join(map(number, interval.bounds))}]" if interval.bounds else ""


def _run_cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "device_s_per_token":
        return number(1000 * value)
    if name == "acceptance":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else number(value)


def _ratio_row(label: str, figure: RatioFigure) -> list[str]:
    change = f"x {number(figure.ratio.value)}{interval_text(figure.ratio)}"
    return [label, _figure_text(figure.baseline), _figure_text(figure.run), change, _verdict_text(figure)]


def _verdict_text(figure: RatioFigure | MetricFigure) -> str:
    if figure.better is None or figure.verdict not in {"higher", "lower"}:
        return figure.verdict
    return f"{figure.verdict}, {'better' if figure.verdict == figure.better else 'worse'}"


def _figure_text(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and value >= 10 else number(value)


def _metric_row(name: str, figure: MetricFigure, num_compared: int) -> list[str]:
    sign, p = "+" if figure.difference.value > 0 else "", f"{figure.p:.4f}" if figure.p >= 1e-4 else f"{figure.p:.1e}"
    change = f"{sign}{number(figure.difference.value)}{interval_text(figure.difference)}, p = {p} ({figure.test})"
    if figure.only_baseline is not None:
        change += (
            f"; pairs in which only the baseline has 1: {figure.only_baseline:,}, only the run: {figure.only_run:,}"
        )
    if figure.pairs < num_compared:
        change += f", {figure.pairs:,} pairs have it"
    return [name, number(figure.baseline), number(figure.run), change, _verdict_text(figure)]


def _markdown(table: Table) -> str:
    head, *rows = [[_escape(cell) for cell in row] for row in table]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    pairs = comparison.pairs
    share = comparison.equal / pairs.num_compared if comparison.equal is not None and pairs.num_compared else None
    equal = {"count": comparison.equal, "share": share, "by": comparison.equal_by}
    return {
        "run": comparison.run,
        "baseline": comparison.baseline,
        "pairs": pairs.both,
        "compared": pairs.num_compared,
        "rows": pairs.num_rows,
        "only_in_baseline": pairs.only_first,
        "only_in_run": pairs.only_second,
        "failed": {"baseline": pairs.failed_first, "run": pairs.failed_second, "both": pairs.failed_both},
        "noise": asdict(comparison.noise),
        "equal": None if comparison.equal is None else equal,
        "ratios": {name: _plain(asdict(figure)) for name, figure in comparison.ratios.items()},
        "metrics": {name: _plain(asdict(figure)) for name, figure in comparison.metrics.items()},
    }


def _plain(value: Any) -> Any:
    """The value with null in the place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


Form = Literal["text", "json", "markdown"]


def compare(
    places: Sequence[Place], *, form: Form = "text", baseline: str | None = None, width: float | None = None
) -> int:
    """Print the comparison; a sweep's directory stands for its cases, `baseline` names one run. Returns the exit code. With a
    `width`, each metric has the sizes that its interval needs.

    Raises UserError if a place has no finished run, or if the runs did not decode the same samples.
    """
    runs, unfinished = find_runs(places)
    comparisons = compare_runs(runs, unfinished=unfinished, baseline=baseline, width=width)
    if form == "json":
        print(json.dumps(as_data(comparisons), indent=1))
    else:
        print((as_markdown if form == "markdown" else as_text)(comparisons), end="")
    return OK
