"""The summary of a run's metrics: mean, count, and how many samples have no value, read from the files of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.formatting import counted
from draftmill.storage.errors import printable
from draftmill.storage.runs.metric_files import KEYS, MetricError, metric_sets, read_metric_errors, read_metrics
from draftmill.storage.stores.interface import Store

EXAMPLES = 3
SHOWN_CHARS = 160


def metric_lines(store: Store, rows: int) -> list[str]:
    """One line per metric, aligned; an empty list if nothing is measured. `rows` is the number of the run's samples."""
    table = read_metrics(store)
    if table is None:
        return []
    estimated = {name for found in metric_sets(store).values() for one in found.metrics for name in one.estimates}
    shown = [
        _of_rows(table, name) if name in estimated else _of_samples(table[name], name, rows)
        for name in table.column_names
        if name not in KEYS.names
    ]
    shown += _pooled(table)
    width = max(len(name) for name, _, _ in shown)
    figures = max(len(figure) for _, figure, _ in shown)
    lines = [f"  {name:<{width}}  {figure:>{figures}}  {text}" for name, figure, text in shown]
    return [*lines, *_error_lines(store)]


Shown = tuple[str, str, str]
"""A metric's name, its mean, and what the mean is over."""


def _of_samples(column: pa.ChunkedArray, name: str, rows: int) -> Shown:
    count = len(column) - column.null_count
    lacking = max(rows, len(column)) - count
    return name, figure_text(pc.mean(column).as_py()), f"mean of {count:,} samples{_without(lacking)}"


def _of_rows(table: pa.Table, name: str) -> Shown:
    """An estimate is the same for all samples of a row: its mean is over rows."""
    groups = table.select(["id", name]).group_by("id").aggregate([(name, "max")])
    column = groups[f"{name}_max"]
    return (
        name,
        figure_text(pc.mean(column).as_py()),
        f"mean of {len(column) - column.null_count:,} rows{_without(column.null_count)}",
    )


def _pooled(table: pa.Table) -> Iterator[Shown]:
    """The perplexity over all tokens together: the mean of samples' perplexities depends on the worst of them."""
    for name in table.column_names:
        stem = name.removesuffix("_perplexity")
        parts = {f"{stem}_logprob", f"{stem}_tokens"}
        if stem != name and parts <= set(table.column_names):
            tokens = pc.sum(table[f"{stem}_tokens"]).as_py()
            logprob = pc.sum(table[f"{stem}_logprob"]).as_py()
            if tokens:
                yield (
                    f"{name}, pooled",
                    figure_text(math.exp(min(700.0, -logprob / tokens))),
                    f"over {tokens:,.0f} tokens",
                )


def _without(count: int) -> str:
    return f", {count:,} without a value" if count else ""


def figure_text(value: Any) -> str:
    """A figure with four digits behind the point, or six significant ones if it is large; - if there is none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _error_lines(store: Store) -> Sequence[str]:
    total = 0
    examples: list[MetricError] = []
    for count, errors in read_metric_errors(store):
        total += count
        examples += errors[: EXAMPLES - len(examples)]
    if not total:
        return []
    lines = [f"  {counted(total, 'error')}, each of one sample and metric:"]
    for one in examples:
        text = printable(f"{one.metric}: {one.id}: {one.message}")
        lines.append(f"    {text if len(text) <= SHOWN_CHARS else f'{text[: SHOWN_CHARS - 3]}...'}")
    return lines
