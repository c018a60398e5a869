"""Checks that metrics fit a job: references, kept columns, texts, samples per row, and the permission to run code. Pure.

A problem is a pair: the path of the key to change, and a sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftmill.actors.metrics.settings import Metric, PassAtK, clashing, expand_metrics, needs_reference
from draftmill.actors.task import Columns, Infill, Marker, Sentences, Task

Problem = tuple[str, str]


def kept_names(keep: Sequence[str], columns: Columns, task: Task, metrics: Sequence[Metric]) -> tuple[str, ...]:
    """The input columns that travel into the results: those of `input.keep`, and the references.

    Without a column of references, metrics that need one compare a filled text with the text itself, which then travels, too.
    """
    names = list(keep)
    reference = columns.reference
    if reference is None and any(needs_reference(metric) for metric in metrics):
        reference = original_column(columns, task)
    if reference is not None and reference not in names:
        names.append(reference)
    return tuple(names)


def original_column(columns: Columns, task: Task) -> str | None:
    """The column with the text as it was before its tokens were hidden; None if the rows do not have it."""
    if not isinstance(task, Infill) or isinstance(task.mask, Marker) or columns.tokens is not None:
        return None
    return columns.sentences or columns.text or "text"


def reference_of(
    columns: Columns, task: Task, kept: Collection[str], named: str | None = None
) -> tuple[str | None, str | None]:
    """The kept column with the references, None if there is none, and what joins a text that is a list of sentences."""
    column = named or columns.reference
    if column is not None:
        return (column if column in kept else None), None
    column = original_column(columns, task)
    if column is None or column not in kept:
        return None, None
    is_list = column == columns.sentences and isinstance(task, Infill) and isinstance(task.mask, Sentences)
    return column, task.mask.separator if is_list and isinstance(task, Infill) and isinstance(
        task.mask, Sentences
    ) else None


def metric_problem(
    metrics: Sequence[Metric],
    fields: Sequence[str],
    *,
    kept: Collection[str],
    has_reference: bool,
    has_tokenizer: bool,
    samples: int | None,
) -> Problem | None:
    """Why these metrics can't be measured on a job's results; None if they can. `fields` are the metrics' own paths."""
    parts = expand_metrics(metrics)
    if clash := clashing([part for _, part in parts]):
        index, column = clash
        place = fields[parts[index][0]]
        return place, f"the column {column!r} is already that of an earlier metric; give this one another `name`"
    for metric, place in zip(metrics, fields, strict=True):
        problem = _reference_problem(metric, has_reference) or _kept_problem(metric, kept)
        if problem is None and metric.needs_text and not has_tokenizer:
            problem = place, f"{metric.shown} needs texts, and the results have none: model.tokenizer is none"
        if problem is None and isinstance(metric, PassAtK):
            problem = _code_problem(metric, place, samples)
        if problem is not None:
            return problem
    return None


def _reference_problem(metric: Metric, has_reference: bool) -> Problem | None:
    if has_reference or not needs_reference(metric):
        return None
    return (
        "input.columns.reference",
        f"the metric {metric.shown!r} needs references, and the results have none; name their column here before the run",
    )


def _kept_problem(metric: Metric, kept: Collection[str]) -> Problem | None:
    lacking = [name for name in metric.kept_columns() if name not in kept]
    if not lacking:
        return None
    there = ", ".join(kept) if kept else "none"
    return "input.keep", f"the metric {metric.shown!r} reads {', '.join(lacking)}; columns in the results: {there}"


def _code_problem(metric: PassAtK, place: str, samples: int | None) -> Problem | None:
    if not metric.allow_code_execution:
        return (
            f"{place}.allow_code_execution",
            "pass_at_k runs code that a model wrote, in a sandbox (docs/security.md); allowed: true",
        )
    if samples is not None and max(metric.k) > samples:
        return f"{place}.k", f"{max(metric.k)} is more than the samples of a row (sampling.n: {samples})"
    return None
