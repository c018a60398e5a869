"""The table at the end of a run, and the lines of its metrics. All of their figures are counted or measured.

Figures of the samples (tokens, NFE, errors) are sums over the units, so they are the same after a resume, after a
crash, and for a run that finished long ago. Figures of the machines (rates, efficiency) come from the recorded sessions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs import formatting
from draftmill.jobs.drive.run_log import Sessions
from draftmill.jobs.drive.totals import device_time_rows, efficiency, exactness, ratio
from draftmill.jobs.formatting import counted, duration, rate_text
from draftmill.jobs.results.passes import Pass, latest_rows
from draftmill.storage.runs.commit import Manifest
from draftmill.storage.runs.metric_files import KEYS, MetricError, metric_sets, read_metric_errors, read_metrics
from draftmill.storage.runs.records import EXAMPLES, SUMMED, Sums, brief_line, read_results, sum_up
from draftmill.storage.stores.store import Store

KINDS = 5
"""Number of error kinds in the table; the most frequent ones are shown."""

MIN_ROWS = 256
MIN_TURNS = 4
MIN_S = 10.0
"""A job with fewer than MIN_ROWS samples or MIN_TURNS per slot, or less than MIN_S seconds of decoding, hardly refills its slots.
Its efficiency figures would reflect the job's size rather than the machine, so its table leaves them out."""


def read_summary(store: Store, manifest: Manifest) -> Sums:
    """The sums over a finished pass: its manifest has them, unless those of a unit were too long: then the results are read."""
    if manifest.sums is not None:
        return manifest.sums
    return sum_up(read_results(store, objects=(unit.object for unit in manifest.units), columns=SUMMED))


def sums_of(passes: Sequence[Pass]) -> Sums:
    """The sums over the rows of a finished run, each as the last pass that has it left it."""
    first = passes[0]
    if len(passes) == 1 and first.manifest is not None:
        return read_summary(first.store, first.manifest)
    return sum_up(latest_rows(passes, columns=SUMMED))


def table_lines(
    name: str,
    url: str,
    manifest: Manifest,
    results: Sums,
    sessions: Sessions,
    *,
    done: str = "generated",
) -> list[str]:
    """The table, one aligned line per figure; `done` is the verb for the new tokens, such as "generated"."""
    rows = [
        *sample_rows(results, done),
        ("exact", exactness(manifest.exact)),
        *machine_rows(results, sessions),
        *([] if sessions.wall_s < MIN_S else device_time_rows(sessions.devices)),
        *error_rows(results),
    ]
    rows.append(("results", f"{url}/data  ({counted(len(manifest.units), 'file')}, {manifest.total('bytes'):,} bytes)"))
    return [f"draftmill: {name}", *formatting.table_lines(rows)]


def sample_rows(results: Sums, done: str) -> list[tuple[str, str]]:
    """Figures of the samples, each with its label."""
    rows = [
        ("samples", f"{results.rows:,}  ({results.ok:,} ok, {results.failed:,} failed, {results.skipped:,} skipped)"),
        ("tokens", f"{results.new_tokens:,} {done}, {results.prompt_tokens:,} given"),
    ]
    if results.cut_rows:
        rows.append(
            ("cut to fit", f"{counted(results.cut_rows, 'sample')}, {counted(results.cut_tokens, 'token')} of them")
        )
    if results.new_tokens:
        rows.append(("NFE per token", f"{results.nfe / results.new_tokens:.3f}"))
    if results.proposed:
        accepted = f"{results.accepted / results.proposed:.1%} of {results.proposed:,} draft tokens"
        rows.append(("acceptance", accepted))
    if results.iterations:
        rows.append(("tokens per iteration", f"{results.new_tokens / results.iterations:.2f}"))
    return rows


def machine_rows(results: Sums, sessions: Sessions) -> list[tuple[str, str]]:
    """Figures of the machines, each with its label; none without recorded sessions."""
    if not sessions.wall_s:
        return []
    rate = ratio(sessions.committed.new_tokens, sessions.wall_s)
    rows = [("tokens/s", f"{rate_text(rate)}  ({duration(sessions.wall_s)} of decoding)")]
    if raised := sessions.effort.engine.raised:
        rows.append(
            ("steps that raised", f"{raised:,}  (their samples were decoded one at a time; see the workers' log)")
        )
    if shares := way_shares(sessions):
        text = ", ".join(f"{share:.1%} {way}" for way, share in shares.items())
        rows.append(("drafts", f"{text}  (shares of the tokens, by what was chosen by time)"))
    if is_small(results.rows, sessions):
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


def way_shares(sessions: Sessions) -> dict[str, float]:
    """The share of the tokens that each way to draft committed where the clock chose it, the largest first."""
    ways = sessions.effort.engine.ways
    return {way: count / sum(ways.values()) for way, count in sorted(ways.items(), key=lambda item: -item[1])}


def is_small(rows: int, sessions: Sessions) -> bool:
    """Whether a job is too small for efficiency figures."""
    engine, workers = sessions.effort.engine, ratio(sessions.worker_s, sessions.wall_s)
    slots = ratio(engine.slot_steps, engine.steps) * workers
    return sessions.wall_s < MIN_S or rows < max(MIN_ROWS, MIN_TURNS * slots)


def error_rows(results: Sums) -> list[tuple[str, str]]:
    """The number of failed samples of each kind and, below, the first few of each kind with their reasons."""
    if not results.errors:
        return [("errors", "none")]
    worst = heapq.nlargest(KINDS, results.errors.items(), key=lambda item: (item[1], item[0]))
    rest = len(results.errors) - len(worst)
    text = ", ".join(f"{count:,} {kind}" for kind, count in worst)
    rows = [("errors", text + (f" and {rest} more kinds" if rest > 0 else ""))]
    for kind, count in worst:
        named = results.examples.get(kind, [])
        rows += [(f"  {kind}", f"{brief_line(name)}: {brief_line(reason)}") for _, name, reason in named]
        if count > len(named):
            rows.append(("", f"and {count - len(named):,} more of status failed and error_kind {kind}"))
    return rows


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
    metrics = [metric for metric_set in metric_sets(store).values() for metric in metric_set.metrics]
    estimated = {name for metric in metrics for name in metric.estimates}
    shown: list[Shown] = []
    for name in table.column_names:
        if name in KEYS.names:
            continue
        column, noun = table[name], "samples"
        if name in estimated:  # it is the same for all samples of a row
            column, noun = table.group_by("id").aggregate([(name, "max")])[f"{name}_max"], "rows"
        count = len(column) - column.null_count
        lacking = max(rows if noun == "samples" else 0, len(column)) - count
        without = f", {lacking:,} without a value" if lacking else ""
        shown.append((name, figure_text(pc.mean(column).as_py()), f"mean of {count:,} {noun}{without}"))
    shown += _pooled_perplexity(table)
    return [*formatting.table_lines(shown), *_error_lines(store)]


Shown = tuple[str, str, str]
"""A metric's name, its mean, and what the mean is over."""


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


def figure_text(value: Any) -> str:
    """A figure with four digits behind the point, or six significant ones if it is large; - if there is none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _error_lines(store: Store) -> list[str]:
    total, examples = 0, list[MetricError]()
    for count, errors in read_metric_errors(store):
        total += count
        examples += errors[: EXAMPLES - len(examples)]
    if not total:
        return []
    lines = [f"  {counted(total, 'error')}, each of one sample and metric:"]
    for error in examples:
        lines.append(f"    {brief_line(f'{error.metric}: {error.id}: {error.message}', ERROR_CHARS)}")
    return lines
