"""`draftmill report`: one HTML file about a finished run, or about the cases of a sweep: what was run, tables, and five plots.

The page is report.html.j2, beside this file; here is what it is filled with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftmill.jobs.analysis import plots
from draftmill.jobs.analysis.compare import comparison_table, equal_text, heading, notes, number, runs_table
from draftmill.jobs.analysis.comparison import Comparisons, baselines_of, compare_runs
from draftmill.jobs.analysis.run_statistics import RunStatistics, read_statistics
from draftmill.jobs.analysis.runs import FinishedRun, check_same_work, find_runs
from draftmill.jobs.analysis.statistics import LEVEL
from draftmill.jobs.driving.cost import PURPOSES, device_time_rows, hours_text, purposes_of
from draftmill.jobs.driving.totals import efficiency, exactness, ratio
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.finished.summary import is_small
from draftmill.jobs.formatting import counted, duration, rate_text
from draftmill.jobs.plan.fingerprint import flat
from draftmill.jobs.spec.sweep_spec import RECORD
from draftmill.storage.errors import UserError, printable
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.stores.interface import Place, is_local
from draftmill.storage.stores.store import open_store

MADE_BY: Final = '<meta name="generator" content="draftmill'
"""How a page of ours is recognized, to be replaced by a newer one."""

EFFICIENCY: Final = {
    "token_padding_eff": "padding efficiency (useful token rows, of those computed)",
    "lane_eff": "lane efficiency (slots occupied)",
    "engine_eff": "engine efficiency (workers' time in forwards)",
    "tail_frac": "tail (workers' time with slots idle and no sample left)",
    "prompts_shared": "prompts shared (prompt rows taken over from other samples, not computed)",
}


def report(place: Place, out: str, *, baseline: str | None = None, overwrite: bool = False) -> int:
    """Write the report on `place` to the local file `out`, whole or not at all; returns the exit code.

    `baseline` is the case with which the others are compared. An earlier report is replaced. UserError if there is no finished
    run, if the file exists and is something else, or if matplotlib is missing.
    """

    def page() -> str:
        store = open_store(place)
        runs, unfinished = find_runs([place])
        is_sweep = store.exists(RECORD)
        title = f"Sweep: {place.url.rstrip('/').rpartition('/')[2]}" if is_sweep else f"Run: {runs[0].plan.spec.name}"
        return report_page(runs, unfinished, title, baseline)

    print(f"{out}: {write_page(out, page, overwrite=overwrite):,} bytes")
    return OK


def write_page(out: str, page: Callable[[], str], *, field: str = "--out", overwrite: bool = False) -> int:
    """Write a page to the local file `out`, whole or not at all; returns its bytes. An earlier page of ours is replaced.

    UserError for `field`, before the page is made, if the file can't be written, or exists and is something else.
    """
    target = Path(os.path.expanduser(out))
    _check_target(target, out, field, overwrite=overwrite)
    content = page().encode()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(content)


def _check_target(target: Path, out: str, field: str, *, overwrite: bool) -> None:
    """Raise UserError for a file that can't be written, before anything is read."""
    if not is_local(out):
        raise UserError(f"{out!r} is not a local file", field=field)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"{out!r} is a folder, or in a folder that does not exist; allowed: a file", field=field)
    if target.exists() and not overwrite:
        with target.open("rb") as file:
            if MADE_BY.encode() not in file.read(1000):
                raise UserError(f"{out!r} exists and is not a page of draftmill; --overwrite replaces it", field=field)


def report_page(runs: Sequence[FinishedRun], unfinished: Sequence[str], title: str, baseline: str | None) -> str:
    """The page of these runs; several are the cases of a sweep, with their short names.

    UserError without a run, without one named `baseline`, or without matplotlib.
    """
    if not runs:
        raise UserError(f"no finished run to report on; not finished: {', '.join(unfinished)}")
    with plots.plotting():
        named = [replace(run, name=run.short or run.name) for run in runs]
        name = None
        if baseline is not None and len(named) > 1:
            name = named[baselines_of(runs, baseline)[0]].name
        compared = comparisons_of(named, name)
        cases = [read_statistics(run) for run in named]
        sections = list(_sections(cases, compared))
    return render_page(
        "report.html.j2",
        title=title,
        lead=_lead(cases, unfinished),
        cards=list(_key_figures(cases[0])) if len(cases) == 1 else [],
        sections=[section for section in sections if section["parts"]],
        foot=_foot(cases),
    )


def render_page(template: str, **content: Any) -> str:
    """Fill a template beside this file; all values are escaped, and control characters are spelled out."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    return environment.get_template(template).render(**content)


Part = dict[str, Any]
"""A part of a section, as the template shows it: its `kind`, and what such a part has."""


def _table(title: str, rows: Sequence[Sequence[str]], *, words: Sequence[int] = ()) -> Part:
    """A table with a header row; the first cell of each row is its heading, `words` are columns of text."""
    return {"kind": "table", "title": title, "rows": rows, "words": words}


def _case_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_one: bool, words: int = 0
) -> Part:
    """A table whose first column names the case, without it if there `is_one` case; the last `words` columns are text."""
    table = [row[is_one:] for row in (["case", *head], *rows)]
    return _table(title, table, words=range(len(table[0]) - words, len(table[0])))


def _facts(title: str, pairs: Iterable[tuple[str, object]]) -> Part:
    return {"kind": "facts", "title": title, "pairs": list(pairs)}


def _note(text: str) -> Part:
    return {"kind": "note", "text": text}


def _details(title: str, data: Any) -> Part:
    """Data as YAML that the reader can open."""
    return {"kind": "details", "title": title, "text": yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}


def comparisons_of(runs: Sequence[FinishedRun], baseline: str | None = None) -> list[Comparisons]:
    """Paired comparisons of the runs that decoded the same, with `baseline` where it is among them."""
    groups: list[list[FinishedRun]] = []
    for run in runs:
        group = next((group for group in groups if _is_same_work(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return [
        compare_runs(group, baseline=baseline if any(run.name == baseline for run in group) else None)
        for group in groups
        if len(group) > 1
    ]


def _is_same_work(run: FinishedRun, other: FinishedRun) -> bool:
    try:
        check_same_work(run.name, run.plan, other.name, other.plan)
    except UserError:
        return False
    return True


def _sections(cases: Sequence[RunStatistics], compared: Sequence[Comparisons]) -> Iterator[dict[str, Any]]:
    for name, title, parts in (
        ("results", "Results", [_results(cases), *_device_times(cases), *_metrics(cases)]),
        ("quality", "Quality against cost", _figures("quality", plots.quality_plot(cases))),
        ("pairs", "Paired comparison", [part for group in compared for part in _comparison(group)]),
        ("acceptance", "Acceptance", _figures("acceptance", plots.acceptance_plot(cases))),
        ("effort", "Forwards", _figures("effort", plots.length_plot(cases))),
        ("time", "Time", _figures("time", plots.course_plot(cases), plots.times_plot(cases))),
        ("errors", "Errors", [_errors(cases)]),
        ("run", "What was run", list(_what_was_run(cases))),
    ):
        yield {"name": name, "title": title, "parts": parts}


def _figures(section: str, *drawn: plots.Plot | None) -> list[Part]:
    named = [(f"{section}-plot{place}", plot) for place, plot in enumerate(filter(None, drawn), start=1)]
    return [{"kind": "figure", "name": name, "plot": plot, "svg": plots.inline_svg(plot, name)} for name, plot in named]


def _lead(cases: Sequence[RunStatistics], unfinished: Sequence[str]) -> str:
    if len(cases) == 1:
        spec = cases[0].run.plan.spec
        return f"{spec.decoder.kind} on {spec.model.path}, task {spec.task.kind}, {cases[0].figures.samples:,} samples"
    left_out = f" Not finished, and left out: {', '.join(unfinished)}." if unfinished else ""
    samples = sum(case.figures.samples for case in cases)
    return f"{counted(len(cases), 'case')}, {samples:,} samples.{left_out}"


def _key_figures(case: RunStatistics) -> Iterator[tuple[str, str]]:
    figures = case.figures
    yield "samples", f"{figures.samples:,}"
    yield "failed", f"{figures.failed:,}"
    yield "tokens", f"{figures.tokens:,}"
    if figures.nfe_per_token is not None:
        yield "NFE per token", number(figures.nfe_per_token)
    if figures.acceptance is not None:
        yield "acceptance", f"{figures.acceptance:.1%}"
    if case.sessions.wall_s:
        yield "tokens per second", rate_text(ratio(case.sessions.committed.new_tokens, case.sessions.wall_s))


def _results(cases: Sequence[RunStatistics]) -> Part:
    if len(cases) == 1:
        return _facts("The run in figures", _run_figures(cases[0]))
    figures = [case.figures for case in cases]
    return _table("Each case over its own samples", runs_table(figures, with_metrics=False), words=[1])


def _run_figures(case: RunStatistics) -> Iterator[tuple[str, str]]:
    figures, sums = case.figures, case.sums
    yield "samples", f"{figures.samples:,} ({figures.samples - figures.failed:,} ok, {figures.failed:,} failed)"
    yield "tokens", f"{figures.tokens:,} {case.run.plan.spec.task.done}, {sums['prompt_tokens']:,} given"
    yield "NFE per token", number(figures.nfe_per_token)
    if figures.nfe_draft_per_token:
        yield "draft NFE per token", number(figures.nfe_draft_per_token)
    yield "device ms per token", number(plots.device_cost(case))
    if sums["iterations"]:
        yield "tokens per iteration", number(figures.tokens_per_iteration)
    if sums["proposed"]:
        yield "acceptance", f"{figures.acceptance:.1%} of {sums['proposed']:,} draft tokens"
        if commits_one_more(case):
            length = number(1 + sums["accepted"] / sums["iterations"])
            yield "mean acceptance length", f"{length} (1 + accepted / iterations)"
    yield from _machine_figures(case)
    yield from device_time_rows(case.spent)


def _device_times(cases: Sequence[RunStatistics]) -> list[Part]:
    """Device time by purpose, if it is known of any case."""
    if len(cases) == 1 or not any(case.spent.up_s for case in cases):
        return []
    rows = [["run", "device time", *PURPOSES]]
    for case in cases:
        rows.append([case.figures.name, *map(hours_text, [case.spent.up_s, *purposes_of(case.spent).values()])])
    return [_table("Device time", rows)]


def commits_one_more(case: RunStatistics) -> bool:
    """Whether iterations commit the accepted drafts and one more token, up to what the ends of texts cut off."""
    beyond = case.sums["iterations"] + case.sums["accepted"] - case.figures.tokens
    return abs(beyond) <= case.figures.samples + 0.02 * case.figures.tokens


def _machine_figures(case: RunStatistics) -> Iterator[tuple[str, str]]:
    sessions = case.sessions
    if not sessions.wall_s:
        return
    rate = ratio(sessions.committed.new_tokens, sessions.wall_s)
    yield "tokens per second", f"{rate_text(rate)} ({duration(sessions.wall_s)} of decoding)"
    if not is_small(case.figures.samples, sessions):
        shares = efficiency(sessions.effort)
        yield from ((label, f"{shares[name]:.1%}") for name, label in EFFICIENCY.items() if name in shares)


def _metrics(cases: Sequence[RunStatistics]) -> list[Part]:
    rows = [
        [case.figures.name, name, plots.interval_words(mean), f"{case.metric_rows[name]:,}"]
        for case in cases
        for name, mean in case.metrics.items()
    ]
    head = ["metric", f"mean ({LEVEL:.0%} interval)", "samples"]
    title = "Metrics: means over the samples that have a value"
    return [_case_table(title, head, rows, is_one=len(cases) == 1)] if rows else []


def _comparison(comparisons: Comparisons) -> Iterator[Part]:
    for comparison in comparisons.against:
        yield _table(heading(comparison), comparison_table(comparison), words=[3, 4])
        if alike := equal_text(comparison):
            yield _note(alike)
    yield from map(_note, notes(comparisons))


def _errors(cases: Sequence[RunStatistics]) -> Part:
    rows = [
        [case.figures.name, kind, f"{count:,}", *map(_brief, case.examples[kind])]
        for case in cases
        for kind, count in case.errors.items()
    ]
    if not rows:
        return _note("No sample failed.")
    head = ["class", "samples", "first id", "its message"]
    return _case_table("Failed samples, with the first of each class", head, rows, is_one=len(cases) == 1, words=2)


def _what_was_run(cases: Sequence[RunStatistics]) -> Iterator[Part]:
    """What all cases share, once, and for each case what differs; the whole spec of the first, and of the others what differs."""
    jobs = [dict(_job(case)) for case in cases]
    specs = [dict(flat(case.run.plan.spec.model_dump(mode="json"))) for case in cases]
    shared = {name: value for name, value in jobs[0].items() if all(job.get(name) == value for job in jobs)}
    yield _facts("The job" if len(cases) == 1 else "The same in all cases", shared.items())
    for case, job in zip(cases, jobs, strict=True):
        own = {name: value for name, value in job.items() if name not in shared}
        if own:
            yield _facts(case.figures.name, own.items())
    title = "The whole spec" if len(cases) == 1 else f"The whole spec of {cases[0].figures.name}"
    yield _details(title, cases[0].run.plan.spec.model_dump(mode="json"))
    for case, spec in zip(cases[1:], specs[1:], strict=True):
        differs = {key: value for key, value in spec.items() if specs[0].get(key, ...) != value}
        differs |= dict.fromkeys(specs[0].keys() - spec.keys(), "not set")
        yield _details(f"How the spec of {case.figures.name} differs", differs)


def _job(case: RunStatistics) -> Iterator[tuple[str, Any]]:
    plan = case.run.plan
    spec, results = plan.spec, plan.results
    yield "name", spec.name
    yield "fingerprint", plan.fingerprint
    yield "task", _settings(spec.task.model_dump(mode="json"))
    model = results["model"]
    weights = (model.get("checkpoint") or "unknown")[:12]
    yield "model", f"{spec.model.path} ({model.get('family', 'unknown family')}, weights {weights})"
    yield "decoder", _settings(spec.decoder.model_dump(mode="json"))
    yield "sampling", f"seed {spec.seed}, {_settings(spec.sampling.model_dump(mode='json'))}"
    files = ", ".join(f"{file.name} ({file.size or 0:,} bytes)" for file in plan.files[:5])
    more = f" and {len(plan.files) - 5:,} more" if len(plan.files) > 5 else ""
    yield "inputs", f"{files}{more}"
    yield "rows and passes", f"{plan.rows:,} samples in {plan.units:,} units, passes: {len(case.run.passes)}"
    yield "draftmill", f"version {plan.code_version}, result schema {results.get('schema_version', 'unknown')}"
    yield "workers", f"{case.workers:,} with results"
    for text, count in case.sessions.started_on.items():
        yield "started", f"{count:,} on {text}"
    if case.started is not None:
        yield "decoded", f"{case.started} to {case.ended}"
    exact = all_exact(pass_.manifest.exact for pass_ in case.run.passes if pass_.manifest is not None)
    yield "exact", exactness(exact)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {_plain(value)}" for name, value in values.items() if value not in (None, [], ()))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{_settings(value)}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _brief(message: str) -> str:
    message = printable(" ".join(message.split()))
    return message if len(message) <= 120 else f"{message[:117]}..."


def _foot(cases: Sequence[RunStatistics]) -> str:
    versions = ", ".join(sorted({case.run.plan.code_version for case in cases}))
    return f"Made by draftmill report from the files of the run alone (version {versions}). Figures are counted or measured."
