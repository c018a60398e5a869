"""The table at the end of a run, and the lines of its metrics. All of their figures are counted or measured.

Figures of the samples (tokens, NFE, errors) are read from the result files, so they are the same after a resume, after a
crash, and for a run that finished long ago. Figures of the machines (rates, efficiency) come from the recorded sessions.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.actors.messages import Tally
from draftmill.jobs.driving.cost import cost_rows
from draftmill.jobs.driving.run_log import Sessions
from draftmill.jobs.driving.totals import efficiency, exactness, ratio
from draftmill.jobs.formatting import counted, duration, rate_text
from draftmill.storage.errors import printable
from draftmill.storage.runs.commit import Manifest
from draftmill.storage.runs.metric_files import KEYS, MetricError, metric_sets, read_metric_errors, read_metrics
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.interface import Store

COUNTED = ("prompt_tokens", "new_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted")
TRUNCATED = "truncated_tokens"

KINDS = 5
"""Number of error kinds in the table; the most frequent ones are shown."""

EXAMPLES = 3
"""Number of failed samples shown for each kind."""

SHOWN_CHARS = 100

MIN_TURNS = 4
MIN_S = 10.0
"""A job with fewer than MIN_TURNS samples per slot, or less than MIN_S seconds of decoding, hardly refills its slots. Its
efficiency figures would reflect the job's size rather than the machine, so its table leaves them out."""


@dataclass(slots=True)
class Results:
    """Sums over the result rows of a run; `longest_s` is the decoding time of its slowest sample.

    `examples` has the first few failed samples of each kind: id and message.
    """

    tally: Tally = field(default_factory=Tally)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    longest_s: float = 0.0
    cut_rows: int = 0
    cut_tokens: int = 0


SUMMED = ("id", "status", "error_kind", "error", "decode_s", TRUNCATED, *COUNTED)
"""The columns that sums need; runs of earlier versions lack TRUNCATED."""


def read_summary(store: Store, objects: Iterable[str]) -> Results:
    """Sum up result files, one in memory at a time."""
    return sum_up(read_results(store, objects=objects, columns=SUMMED))


def sum_up(tables: Iterable[pa.Table]) -> Results:
    """Sum up tables with the columns SUMMED."""
    results = Results()
    for table in tables:
        results.tally += _tally(table)
        _note_errors(results, table.filter(pc.equal(table["status"], "failed")))
        if TRUNCATED in table.column_names:
            results.cut_rows += pc.sum(pc.greater(table[TRUNCATED], 0)).as_py() or 0
            results.cut_tokens += pc.sum(table[TRUNCATED]).as_py() or 0
        results.longest_s = max(results.longest_s, pc.max(table.column("decode_s")).as_py() or 0.0)
    return results


def _note_errors(results: Results, failed: pa.Table) -> None:
    for row in failed.select(["id", "error_kind", "error"]).to_pylist():
        kind = row["error_kind"] or "unknown"
        results.errors[kind] += 1
        examples = results.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append((row["id"], row["error"] or ""))


def _tally(table: pa.Table) -> Tally:
    statuses = Counter(table.column("status").to_pylist())
    sums = {name: pc.sum(table.column(name)).as_py() or 0 for name in COUNTED}
    return Tally(rows=table.num_rows, ok=statuses["ok"], failed=statuses["failed"], skipped=statuses["skipped"], **sums)


def table_lines(
    name: str,
    url: str,
    manifest: Manifest,
    results: Results,
    sessions: Sessions,
    *,
    done: str = "generated",
) -> list[str]:
    """The table, one aligned line per figure; `done` is the verb for the new tokens, such as "generated"."""
    rows = [
        *_sample_rows(results, done),
        ("exact", exactness(manifest.exact)),
        *_machine_rows(results, sessions),
        *_cost_rows(results, sessions),
        *error_rows(results),
    ]
    rows.append(("results", f"{url}/data  ({counted(len(manifest.units), 'file')}, {manifest.total('bytes'):,} bytes)"))
    width = max(len(label) for label, _ in rows)
    return [f"draftmill: {name}", *(f"  {label:<{width}}  {value}" for label, value in rows)]


def _sample_rows(results: Results, done: str) -> list[tuple[str, str]]:
    tally = results.tally
    rows = [
        ("samples", f"{tally.rows:,}  ({tally.ok:,} ok, {tally.failed:,} failed, {tally.skipped:,} skipped)"),
        ("tokens", f"{tally.new_tokens:,} {done}, {tally.prompt_tokens:,} given"),
    ]
    if results.cut_rows:
        rows.append(("cut to fit", f"{results.cut_rows:,} samples, {results.cut_tokens:,} tokens of them"))
    if tally.new_tokens:
        rows.append(("NFE per token", f"{tally.nfe / tally.new_tokens:.3f}"))
    if tally.proposed:
        accepted = f"{tally.accepted / tally.proposed:.1%} of {tally.proposed:,} draft tokens"
        rows.append(("acceptance", accepted))
    if tally.iterations:
        rows.append(("tokens per iteration", f"{tally.new_tokens / tally.iterations:.2f}"))
    return rows


def _machine_rows(results: Results, sessions: Sessions) -> list[tuple[str, str]]:
    if not sessions.wall_s:
        return []
    rate = ratio(sessions.committed.new_tokens, sessions.wall_s)
    rows = [("tokens/s", f"{rate_text(rate)}  ({duration(sessions.wall_s)} of decoding)")]
    if raised := sessions.effort.engine.raised:
        rows.append(
            ("steps that raised", f"{raised:,}  (their samples were decoded one at a time; see the workers' log)")
        )
    if is_small(results.tally.rows, sessions):
        return rows
    figures = efficiency(sessions.effort)
    named = [
        ("padding efficiency", "token_padding_eff", "useful token rows, of those computed"),
        ("lane efficiency", "lane_eff", "slots occupied"),
        ("engine efficiency", "engine_eff", "workers' time in forwards"),
        ("tail", "tail_frac", "workers' time with slots idle and no sample left"),
        ("prompts shared", "prompts_shared", "prompt rows taken over from other samples, not computed"),
    ]
    rows += [(label, f"{figures[key]:.1%}  ({what})") for label, key, what in named if key in figures]
    workers = ratio(sessions.worker_s, sessions.wall_s)
    bound_s = max(ratio(sessions.effort.wall_s - sessions.effort.tail_s, workers), results.longest_s)
    if bound_s:
        rows.append(
            ("makespan ratio", f"{sessions.wall_s / bound_s:.2f}  (1 is the optimum for {workers:.0f} workers)")
        )
    return rows


def _cost_rows(results: Results, sessions: Sessions) -> list[tuple[str, str]]:
    if sessions.wall_s < MIN_S and not sessions.devices.priced_s:
        return []
    return cost_rows(sessions.devices, results.tally.new_tokens)


def is_small(rows: int, sessions: Sessions) -> bool:
    """Whether a job is too small for efficiency figures."""
    engine, workers = sessions.effort.engine, ratio(sessions.worker_s, sessions.wall_s)
    slots = ratio(engine.slot_steps, engine.steps) * workers
    return sessions.wall_s < MIN_S or rows < MIN_TURNS * slots


def error_rows(results: Results) -> list[tuple[str, str]]:
    """The number of failed samples of each kind and, below, the first few of each kind with their reasons."""
    if not results.errors:
        return [("errors", "none")]
    worst = heapq.nlargest(KINDS, results.errors.items(), key=lambda item: (item[1], item[0]))
    rest = len(results.errors) - len(worst)
    text = ", ".join(f"{count:,} {kind}" for kind, count in worst)
    rows = [("errors", text + (f" and {rest} more kinds" if rest > 0 else ""))]
    for kind, count in worst:
        named = results.examples.get(kind, [])
        rows += [(f"  {kind}", f"{_brief(name)}: {_brief(reason)}") for name, reason in named]
        if count > len(named):
            rows.append(("", f"and {count - len(named):,} more of status failed and error_kind {kind}"))
    return rows


def _brief(text: str, most: int = SHOWN_CHARS) -> str:
    """The text in one line of at most so many characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def metric_means(store: Store) -> dict[str, float | None]:
    """The mean of every measured metric over the samples that have a value; None where none has."""
    table = read_metrics(store)
    if table is None:
        return {}
    return {name: pc.mean(table[name]).as_py() for name in table.column_names if name not in KEYS.names}


ERROR_CHARS = 160


def metric_lines(store: Store, rows: int) -> list[str]:
    """One line per metric, aligned; an empty list if nothing is measured. `rows` is the number of the run's samples."""
    table = read_metrics(store)
    if table is None:
        return []
    estimated = {
        name for metric_set in metric_sets(store).values() for metric in metric_set.metrics for name in metric.estimates
    }
    shown = [
        _of_rows(table, name) if name in estimated else _of_samples(table[name], name, rows)
        for name in table.column_names
        if name not in KEYS.names
    ]
    shown += _pooled_perplexity(table)
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


def _pooled_perplexity(table: pa.Table) -> Iterator[Shown]:
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
    for error in examples:
        lines.append(f"    {_brief(f'{error.metric}: {error.id}: {error.message}', ERROR_CHARS)}")
    return lines
