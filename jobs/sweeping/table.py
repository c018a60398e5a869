"""The table at the end of a sweep: one row per case, all of it counted or measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from draftmill.jobs.driving.run_log import read_sessions
from draftmill.jobs.driving.totals import ratio
from draftmill.jobs.finished.passes import left_failed, passes_of, units_done
from draftmill.jobs.finished.summary import figure_text, read_summary
from draftmill.jobs.formatting import counted, rate_text
from draftmill.jobs.spec.sweep_spec import Sweep
from draftmill.jobs.sweeping.cases import SweepCase
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.runs.metric_files import KEYS, read_metrics

COLUMNS = ("case", "samples", "tokens/s", "NFE/token", "acceptance", "failed")
ABSENT = "-"


def sweep_lines(made: Sweep, cases: Sequence[SweepCase], problems: dict[str, str]) -> list[str]:
    """The table, in the order of the sweep file, and the command that compares the finished cases."""
    by_name = {case.name: case for case in cases}
    means = {case.name: metric_means(case) for case in cases}
    metrics = list(dict.fromkeys(name for those in means.values() for name in those))
    rows = [_row(by_name[case.name]) if case.name in by_name else [case.name, "can't run"] for case in made.cases]
    for row in rows:
        if means.get(row[0]) and len(row) == len(COLUMNS):
            row += [figure_text(means[row[0]].get(name)) for name in metrics]
    finished = [case for case in cases if read_manifest(case.store) is not None]
    lines = [f"draftmill: {made.name}, {counted(len(made.cases), 'case')}", *table([[*COLUMNS, *metrics], *rows])]
    if len(finished) > 1:
        endpoint = finished[0].spec.s3.endpoint
        more = "" if endpoint is None else f" --s3-endpoint {shlex.quote(endpoint)}"
        lines.append(f"compare them: draftmill compare {shlex.quote(made.path)}{more}")
    return lines


def metric_means(case: SweepCase) -> dict[str, Any]:
    """The mean of every measured metric over the samples that have a value; None where none has."""
    found = read_metrics(case.store) if case.metrics is not None else None
    if found is None:
        return {}
    return {name: pc.mean(found[name]).as_py() for name in found.column_names if name not in KEYS.names}


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text, the first column to the left and the others to the right; short rows are filled."""
    width = max(map(len, rows))
    full = [[*row, *[ABSENT] * (width - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(width)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in range(1, width))]).rstrip()
        for row in full
    ]


def _row(case: SweepCase) -> list[str]:
    manifest = read_manifest(case.store)
    if manifest is None:
        return [case.name, _progress(case)]
    tally: Any = read_summary(case.store, (unit.object for unit in manifest.units)).tally
    sessions = read_sessions(case.store)
    rate = ratio(sessions.committed.new_tokens, sessions.wall_s)
    return [
        case.name,
        f"{tally.rows:,}",
        rate_text(rate) if rate else ABSENT,
        f"{tally.nfe / tally.new_tokens:.3f}" if tally.new_tokens else ABSENT,
        f"{tally.accepted / tally.proposed:.1%}" if tally.proposed else ABSENT,
        f"{left_failed(passes_of(case.store, s3=case.spec.s3.options())):,}",
    ]


def _progress(case: SweepCase) -> str:
    """How far a case is that is not finished."""
    if case.plan is None:
        return "not planned"
    done = len(units_done(case.store))
    return f"{done:,} of {case.plan.units:,} units"
