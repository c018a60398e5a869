"""`draftmill sweep --dry-run`: the cases, the models that a worker loads, and their tokens and time. Writes nothing.

The report says where each figure comes from: counted (in a plan, or because all rows were read), estimated from the first rows,
or measured in a short trial on one worker in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftmill.actors.loop.loading import ModelCache
from draftmill.jobs.driving.totals import ratio
from draftmill.jobs.finished.passes import units_done
from draftmill.jobs.forecasting.trial import (
    SAMPLE_ROWS,
    TRIAL_ROWS,
    TRIAL_S,
    Trial,
    TrialRow,
    TrialSample,
    first_canvases,
    take_sample,
    try_out,
)
from draftmill.jobs.formatting import counted, duration, rate_text, table_lines
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.plan.shared_plan import plan_groups
from draftmill.jobs.spec.sweep_spec import Sweep, changes_text
from draftmill.jobs.sweeping.cases import SweepCase, in_order, loads_of
from draftmill.storage.errors import UserError

ALL_TRIALS_S = 60.0
SHORTEST_TRIAL_S = 1.0
"""The trials of all cases together take about ALL_TRIALS_S, but each at least SHORTEST_TRIAL_S and at most TRIAL_S."""

ABSENT = "-"
"""A figure of a case that had no trial."""

COLUMNS = ("case", "loads", "samples", "new tokens", "tokens/s", "time")


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of a case: samples and tokens to generate or score. `counted` if no figure is an estimate."""

    samples: float
    tokens: float
    counted: bool


def dry_run_lines(made: Sweep, cases: Sequence[SweepCase]) -> Iterator[str]:
    """The report, line by line, as it becomes known."""
    ready = in_order([case for case in cases if case.is_ready])
    loads = loads_of(ready)
    models = counted(sum("model" in names for names in loads), "model load")
    yield f"sweep     {made.name}: {counted(len(made.cases), 'case')}, {models} on each worker"
    yield f"output    {made.path}"
    for case in cases:
        state = ", finished already" if case.is_closed else ", planned already" if case.plan is not None else ""
        yield f"  {case.name}: {changes_text(case.changes)}{state}"
    if lacking := [case.name for case in cases if case.lacks_metrics()]:
        yield f"metrics   left to measure, without decoding, in {counted(len(lacking), 'case')}: {', '.join(lacking)}"
    if not ready:
        yield "nothing is left to decode"
        return
    trial_s = max(SHORTEST_TRIAL_S, min(TRIAL_S, ALL_TRIALS_S / len(ready)))
    yield f"trial     loading each model, then decoding for about {trial_s:.0f} s per case"
    works = work_of(ready)
    trials = _trials(ready, trial_s)
    rows, seconds, notes = [list(COLUMNS)], 0.0, []
    for case, names, trial in zip(ready, loads, trials, strict=True):
        work = works[case.name]
        rate = ratio(trial.tokens, trial.took_s) if isinstance(trial, Trial) else 0.0
        if isinstance(trial, str):
            notes.append(f"  {case.name}: no trial: {trial}")
        elif trial.longest is not None:
            notes.append(
                f"  {case.name}: longer samples were cut to {trial.longest:,} tokens, so the case takes longer"
            )
        about = "" if work.counted else "~"
        seconds += ratio(work.tokens, rate)
        rows.append(
            [
                case.name,
                ", ".join(names) or ABSENT,
                f"{about}{work.samples:,.0f}",
                f"{about}{work.tokens:,.0f}",
                rate_text(rate) if rate else ABSENT,
                f"~{duration(work.tokens / rate)}" if rate else ABSENT,
            ]
        )
    yield from table_lines(rows, right=True)
    yield from notes
    yield f"time      ~{duration(seconds)} on one worker{_without(rows)}; divide by the number of workers"
    yield from _sources(works.values(), trial_s)


def _without(rows: Sequence[Sequence[str]]) -> str:
    missing = sum(row[-1] == ABSENT for row in rows)
    return f", without {counted(missing, 'case')} that had no trial" if missing else ""


def _sources(works: Iterable[Work], trial_s: float) -> Iterator[str]:
    yield "where these figures come from"
    if all(work.counted for work in works):
        yield "  samples, new tokens: counted, in the plan or by reading all rows; for completions the most that may be generated"
    else:
        yield (
            f"  samples, new tokens: from a plan, or estimated (~) from the first {SAMPLE_ROWS} rows; for completions the most "
            "that may be generated"
        )
    trial = f"about {trial_s:.0f} s per case, with up to {TRIAL_ROWS} samples"
    yield f"  tokens/s: measured on one worker in this process, for {trial}"
    yield "  time: new tokens divided by tokens/s; loading, planning, writing and metrics are not in it"


def work_of(cases: Sequence[SweepCase]) -> dict[str, Work]:
    """What is left of each case, by name; the rows of cases that would share a plan are read once."""
    found: dict[str, Work] = {}
    for group in plan_groups([case.prepared for case in cases]):
        members = [cases[number] for number in group]
        sample = None
        for case in members:
            if case.plan is not None:
                found[case.name] = _left(case, case.plan)
            else:
                sample = sample or take_sample(case.prepared)
                found[case.name] = _estimated(sample)
    return found


def _left(case: SweepCase, plan: Plan) -> Work:
    done = units_done(case.store)
    rows = sum(size.rows for size in plan.sizes() if size.unit not in done)
    return Work(rows, plan.holes * ratio(rows, plan.rows), rows == plan.rows)


def _estimated(sample: TrialSample) -> Work:
    masked = sample.masked()
    return Work(sample.total, float(masked.mean()) * sample.total, sample.exact)


def _trials(cases: Sequence[SweepCase], trial_s: float) -> list[Trial | str]:
    """A trial of each case, or why there is none; the networks stay in memory from case to case."""
    model_cache = ModelCache()
    canvases: dict[int, list[TrialRow]] = {}
    for group in plan_groups([case.prepared for case in cases]):
        made = first_canvases(cases[group[0]].prepared, TRIAL_ROWS)
        canvases |= dict.fromkeys(group, made)
    return [_trial(case, canvases[number], trial_s, model_cache) for number, case in enumerate(cases)]


def _trial(case: SweepCase, canvases: Sequence[TrialRow], trial_s: float, model_cache: ModelCache) -> Trial | str:
    if not canvases:
        return "every sampled row fails"
    try:
        return try_out(case.prepared, canvases, trial_s=trial_s, model_cache=model_cache)
    except UserError as error:
        return str(error)
    finally:
        model_cache.rest()
