"""`draftmill sweep`: runs or resumes the cases of a sweep file, one after another on the same workers. Idempotent.

    sweep file -> cases, all checked -> Ray -> plans (shared) -> sweep.json -> each case: units, manifest, _SUCCESS -> table

Every case is a run directory of its own under `cases/`, planned, decoded and closed by the code of `draftmill run`, under its own
lease; the sweep as a whole has a lease too. Workers stay from case to case, with the networks that the next case needs.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from draftmill.actors.loop.loading import fetch_drafter, network_keys
from draftmill.actors.task import today
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.config.sweep_spec import CASES, RECORD, CaseSpec, Sweep, changes_text, load_sweep
from draftmill.jobs.drive.backend import Backend, backend_of
from draftmill.jobs.drive.driver import TOO_MANY, StopFlag
from draftmill.jobs.drive.leases import hold_lease
from draftmill.jobs.drive.log import print_result
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import RayDidNotStart
from draftmill.jobs.drive.run_log import RunLog, read_sessions
from draftmill.jobs.drive.totals import ratio
from draftmill.jobs.exit_codes import (
    INTERRUPTED,
    OK,
    TOO_MANY_FAILED,
    UNUSABLE,
    Ended,
    code_of,
    severest,
    too_many_failed,
)
from draftmill.jobs.formatting import counted, rate_text, table_lines
from draftmill.jobs.plan.plan import DRAFTER_FIELD, LAST, Plan, finished_run, load_plan
from draftmill.jobs.plan.planning import copy_plan, make_plan, plan_groups
from draftmill.jobs.plan.resolve import Resolved, resolve
from draftmill.jobs.results.measure import CheckedMetrics, measure_units, ready_for, units_to_measure
from draftmill.jobs.results.passes import count_failed, passes_of
from draftmill.jobs.results.summary import figure_text, metric_means, read_summary
from draftmill.jobs.run.session import Run, RunOptions, decode
from draftmill.storage.errors import UNUSABLE_ERRORS, StoreError, UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.runs.commit import done_units, is_closed, read_manifest
from draftmill.storage.runs.lease import LeaseHeld
from draftmill.storage.stores.store import NotFound, Store, open_store, probe

_log = logging.getLogger(__name__)

FORMAT = 1

SHOWN_NAMES = 5
"""Cases with the same problem that are named; the others are counted."""


def sweep(path: str, overrides: Sequence[str], options: RunOptions, *, dry_run: bool = False) -> int:
    """Run or resume a sweep, or only show what it would do; returns the exit code.

    Raises UserError if the sweep file can't be used, or none of its cases can run; then nothing has been written.
    """
    spec = load_sweep(path, overrides)
    backend = backend_of(address=options.ray_address, local=options.local, keep=True)
    with Display() as display:
        cases, problems = check_cases(spec.cases, backend, display)
    warn_of(problems, len(spec.cases))
    if any(case.spec.notify for case in cases):
        _log.warning("a sweep sends no notices: `notify` is not used")
    if dry_run:
        for line in dry_run_lines(spec, cases):
            print_result(line)
        return UNUSABLE if problems else OK
    store = open_store(cases[0].spec.place(spec.path))
    if any(case.is_ready or case.lacks_metrics() for case in cases) or not is_recorded(store, spec, cases):
        run_cases(spec, cases, store, backend, options)
    else:
        print_result(f"{store.url} is already finished")
    return report_end(spec, cases, problems)


def warn_of(problems: Mapping[str, str], count: int) -> None:
    """Print the problems of cases, each once with the names; UserError if all of the sweep's `count` cases have one."""
    if not problems:
        return
    lines = []
    for problem in dict.fromkeys(problems.values()):
        names = [name for name, own in problems.items() if own == problem]
        more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
        text = problem.replace("\n", "\n    ")
        lines.append(f"  {', '.join(names[:SHOWN_NAMES])}{more}: {text}")
    text = "\n".join(lines)
    if len(problems) == count:
        raise UserError(f"no case of the sweep can run\n{text}")
    _log.warning(f"{counted(len(problems), 'case')} of {count} can't run; the others do\n{text}")


def run_cases(spec: Sweep, cases: list[SweepCase], store: Store, backend: Backend, options: RunOptions) -> None:
    """Plan and decode the cases that are not decoded yet, then measure what lacks metrics, under the sweep's lease."""
    probe(store)
    ready = in_order([case for case in cases if case.is_ready])
    with Display() as display:
        closed = [case for case in cases if case.is_closed]
        session = SweepSession(options, backend, display, last=closed[-1] if closed else None)
        with hold_lease(store, session.lost):
            store.delete_strays()
            with backend.opening(display, [case.resolved for case in ready]) as refusals:
                for case, error in zip(ready, refusals, strict=True):
                    if error is not None:
                        case.fail(UNUSABLE, error)
                plan_cases(cases, backend, display)
                late = {case.name: case.problem for case in ready if case.problem and case.code == UNUSABLE}
                warn_of(late, len(cases))
                failpoint("sweep.before_record")
                store.put(RECORD, record_of(spec, [case for case in cases if case.plan is not None]))
                left, first = [case for case in ready if case.is_ready], len(cases) - len(ready) + 1
                for number, (case, loads) in enumerate(zip(left, loads_of(left), strict=True), start=first):
                    if session.reason is not None:
                        return
                    display.heading = f"case {number} of {len(cases)}, {case.name}: "
                    display.note(f"case {number} of {len(cases)}: {case.name} ({changes_text(case.changes)})")
                    session.decode(case, loads=not {"model", "drafter"}.isdisjoint(loads))
                session.measure(cases)


@dataclass(slots=True)
class SweepSession:
    """Decodes and measures cases. `current` is the stop flag of the case that runs, `reason` why the sweep must stop. `last` is
    the last finished case."""

    options: RunOptions
    backend: Backend
    display: Display
    current: StopFlag = field(default_factory=StopFlag)
    reason: str | None = None
    last: SweepCase | None = None

    def lost(self, reason: str) -> None:
        """The sweep's lease is lost: stop this case, and start no other."""
        self.reason = reason
        self.current.set(reason)

    def decode(self, case: SweepCase, *, loads: bool) -> None:
        """Decode one case; a problem of this case alone does not end the sweep."""
        assert case.plan is not None
        with self._blame(case) as stop, hold_lease(case.store, stop.set) as lease:
            failpoint("sweep.before_case")
            self.display.log = RunLog()
            run = Run(
                self._drafted(case), case.plan, self.options, lease, stop, self.display, self.backend, loads=loads
            )
            decode(run)
            case.is_closed, self.last = True, case

    def _drafted(self, case: SweepCase) -> Resolved:
        """The case with the texts of the last finished one as drafts, if it wants them."""
        if not case.takes_last or self.last is None:
            return case.resolved
        place = self.last.spec.place(self.last.spec.output.path)
        try:
            _, run = finished_run(place.url, place, case.resolved.results["model"]["tokenizer"])
        except UserError as error:  # drafts change no text
            self.display.note(f"{case.name}: {error.message}; its texts do not draft")
            return case.resolved
        self.display.note(f"{case.name}: the texts of {self.last.name} draft")
        return replace(case.resolved, earlier=(*case.resolved.earlier, run))

    def measure(self, cases: Sequence[SweepCase]) -> None:
        """Measure the metrics that decoded cases lack. It comes last, since the workers that decode must end first."""
        lacking = [case for case in cases if case.lacks_metrics()]
        if not lacking:
            return
        self.backend.end_spare()
        with self.backend.opened(self.display):
            for number, case in enumerate(lacking, start=1):
                if self.reason is not None:
                    case.code = INTERRUPTED
                    continue
                assert case.metrics is not None
                self.display.heading = f"metrics of case {number} of {len(lacking)}, {case.name}: "
                self.display.note(f"metrics of case {number} of {len(lacking)}: {case.name}")
                with self._blame(case) as stop, hold_lease(case.store, stop.set):
                    measure_units(
                        case.store,
                        case.metrics,
                        backend=self.backend,
                        display=self.display,
                        stop=stop,
                        grace_s=self.options.grace_s,
                    )
            self.backend.end_spare()

    @contextmanager
    def _blame(self, case: SweepCase) -> Iterator[StopFlag]:
        """A stop flag for the work on one case. Errors in the block fail this case alone; a signal in it stops the sweep."""
        stop = self.current = StopFlag()
        try:
            yield stop
        except RayDidNotStart:
            raise
        except Ended as end:
            case.code, case.problem = end.code, None if end.code == INTERRUPTED else str(end)
        except (UserError, StoreError) as error:
            case.fail(code_of(error), error)
        if case.problem is not None:
            self.display.note(f"case {case.name}: {case.problem}")
        if stop.reason not in {None, TOO_MANY}:
            self.reason = self.reason or stop.reason


def report_end(spec: Sweep, cases: Sequence[SweepCase], problems: Mapping[str, str]) -> int:
    """Print how the sweep ended; returns its exit code."""
    for case in cases:
        if case.is_closed and case.code is None:
            passes = passes_of(case.store)
            has_failed = too_many_failed(count_failed(passes), passes[0].plan.rows, case.spec.errors)
            case.code = TOO_MANY_FAILED if has_failed else OK
    codes = [UNUSABLE] * bool(problems) + [INTERRUPTED if case.code is None else case.code for case in cases]
    code = severest(codes)
    for line in sweep_lines(spec, cases):
        print_result(line)
    for case in cases:
        if case.problem is not None:
            _log.error(f"{case.name}: {case.problem}")
    if code == INTERRUPTED:
        finished = sum(case.problem is None and case.code in {OK, TOO_MANY_FAILED} for case in cases)
        _log.warning(f"interrupted with {finished} of {len(spec.cases)} cases finished; run it again to resume")
    return code


# ---- sweep.json


def record_of(spec: Sweep, cases: Iterable[SweepCase]) -> bytes:
    """The content of sweep.json: cases that can run, in the order of the sweep file; a refused spec is not kept."""
    listed = [{"name": case.name, "path": f"{CASES}/{case.name}", "changes": case.changes} for case in cases]
    return (json.dumps({"format": FORMAT, "name": spec.name, "cases": listed}, indent=1) + "\n").encode()


def is_recorded(store: Store, spec: Sweep, cases: Iterable[SweepCase]) -> bool:
    """Whether sweep.json has the cases of the sweep file."""
    try:
        return store.get(RECORD) == record_of(spec, cases)
    except NotFound:
        return False


# ---- the table at the end

COLUMNS = ("case", "samples", "tokens/s", "NFE/token", "acceptance", "failed")


def sweep_lines(spec: Sweep, cases: Sequence[SweepCase]) -> list[str]:
    """The table, in the order of the sweep file, and the command that compares the finished cases."""
    by_name = {case.name: case for case in cases}
    means = {case.name: {} if case.metrics is None else metric_means(case.store) for case in cases}
    metrics = list(dict.fromkeys(name for case_means in means.values() for name in case_means))
    rows = [_row(by_name[case.name]) if case.name in by_name else [case.name, "can't run"] for case in spec.cases]
    finished = [row[0] for row in rows if len(row) == len(COLUMNS)]
    for row in rows:
        if row[0] in finished and means[row[0]]:
            row += [figure_text(means[row[0]].get(name)) for name in metrics]
    lines = [
        f"draftmill: {spec.name}, {counted(len(spec.cases), 'case')}",
        *table_lines([[*COLUMNS, *metrics], *rows], right=True),
    ]
    if len(finished) > 1:
        endpoint = cases[0].spec.s3.endpoint
        more = "" if endpoint is None else f" --s3-endpoint {shlex.quote(endpoint)}"
        lines.append(f"compare them: draftmill compare {shlex.quote(spec.path)}{more}")
    return lines


def _row(case: SweepCase) -> list[str]:
    manifest = read_manifest(case.store)
    if manifest is None and case.plan is None:
        return [case.name, "not planned"]
    if manifest is None:
        assert case.plan is not None
        return [case.name, f"{len(done_units(case.store)):,} of {case.plan.units:,} units"]
    tally = read_summary(case.store, manifest)
    sessions = read_sessions(case.store)
    rate = ratio(sessions.committed.new_tokens, sessions.wall_s)
    return [
        case.name,
        f"{tally.rows:,}",
        rate_text(rate) if rate else "-",
        f"{tally.nfe / tally.new_tokens:.3f}" if tally.new_tokens else "-",
        f"{tally.accepted / tally.proposed:.1%}" if tally.proposed else "-",
        f"{count_failed(passes_of(case.store)):,}",
    ]


# ---- --dry-run


def dry_run_lines(spec: Sweep, cases: Sequence[SweepCase]) -> Iterator[str]:
    """The cases in the order in which they would run, with what each changes and what a worker loads for it."""
    ready = in_order([case for case in cases if case.is_ready])
    loads = {case.name: names for case, names in zip(ready, loads_of(ready), strict=True)}
    models = counted(sum("model" in names for names in loads.values()), "model load")
    yield f"sweep     {spec.name}: {counted(len(spec.cases), 'case')}, {models} on each worker"
    yield f"output    {spec.path}"
    for case in [*ready, *(case for case in cases if not case.is_ready)]:
        state = f"loads {', '.join(loads[case.name]) or 'nothing'}" if case.is_ready else "finished already"
        yield f"  {case.name}: {changes_text(case.changes)}; {state}"
    if lacking := [case.name for case in cases if case.lacks_metrics()]:
        yield f"metrics   left to measure, without decoding, in {counted(len(lacking), 'case')}: {', '.join(lacking)}"
    if not ready:
        yield "nothing is left to decode"


# ---- the cases as jobs: checked, put into an order in which models stay loaded, and planned together


@dataclass(slots=True)
class SweepCase:
    """A case that can run. `plan` is None until it is planned; `code` is its exit code, None while it has not ended.

    `is_closed` says that all of its units are committed. `problem` is why it can't run after all. `metrics` are
    those of its spec, checked; None if it has none. `takes_last`: the last case that is finished by then drafts for it.
    """

    name: str
    changes: Mapping[str, Any]
    store: Store
    resolved: Resolved
    plan: Plan | None
    is_closed: bool
    metrics: CheckedMetrics | None = None
    takes_last: bool = False
    code: int | None = None
    problem: str | None = None

    @property
    def spec(self) -> JobSpec:
        return self.resolved.spec

    @property
    def is_ready(self) -> bool:
        """Whether it has units to decode, as far as is known."""
        return not self.is_closed and self.code is None

    def lacks_metrics(self) -> bool:
        """Whether all of its units are committed, and some of them lack metrics."""
        is_decoded = self.problem is None and self.is_closed
        return self.metrics is not None and is_decoded and bool(units_to_measure(self.store, self.metrics))

    def fail(self, code: int, problem: object) -> None:
        """Note that it can't run."""
        self.code, self.problem = code, str(problem)

    def needs(self) -> dict[str, Hashable]:
        """What decides which of a worker's networks the next case can use, by name: `resources`, and those of its networks."""
        drafter = fetch_drafter(self.spec.decoder, self.spec.s3.options())
        networks = network_keys(self.resolved.folder, self.spec.model_place(), self.resolved.recipe.decoder, drafter)
        return {"resources": tuple(shape.resources for shape in self.spec.shapes), **networks}


def check_cases(
    cases: Sequence[CaseSpec], backend: Backend, display: Display
) -> tuple[list[SweepCase], dict[str, str]]:
    """The cases that can run, and what is wrong with the others, by name. Writes nothing and loads no model."""
    usable: list[SweepCase] = []
    problems: dict[str, str] = {}
    listed, day = cache(list_inputs), today()  # cases have one date, also around midnight
    for case in cases:
        try:
            if case.spec is None:
                assert case.error is not None
                raise case.error
            spec, store = case.spec, open_store(case.spec.place(case.spec.output.path))
            if spec.input.run is not None:
                raise UserError(
                    "a sweep reads files; `draftmill export` makes one of the run, for input.path", field="input.run"
                )
            spec, takes_last = without_last(spec)
            inputs = listed(*spec.input_places, delimiter=spec.input.delimiter)
            resolved = resolve(spec, store, display, inputs=inputs, day=day)
            finished = resolved.plan is not None and is_closed(store)
            if not finished:
                backend.check(spec)
            metrics = ready_for(spec, resolved.plan)
            usable.append(
                SweepCase(case.name, case.changes, store, resolved, resolved.plan, finished, metrics, takes_last)
            )
        except UNUSABLE_ERRORS as error:
            problems[case.name] = str(error)
    return usable, problems


def without_last(spec: JobSpec) -> tuple[JobSpec, bool]:
    """The job without `last` among the runs that draft, and whether it had it: which case that is turns out when it starts."""
    names = spec.decoder.drafting_runs
    if LAST not in names:
        return spec, False
    if spec.sampling.acceptance == "rejection":
        raise UserError(
            "under rejection texts depend on drafts, so in a sweep on the cases that are finished before; allowed: run "
            "directories, or sampling.acceptance: coupled",
            field=DRAFTER_FIELD,
        )
    return spec.with_drafting_runs(tuple(name for name in names if name != LAST)), True


def in_order(cases: Sequence[SweepCase]) -> list[SweepCase]:
    """The cases so that those with the same resources, model, drafter and heads follow each other; else in their order."""
    first: dict[tuple[Hashable, ...], int] = {}
    ranks: list[list[int]] = []
    for number, case in enumerate(cases):
        needs = case.needs()
        key = tuple(needs.get(name) for name in ("resources", "model", "drafter", "heads"))
        ranks.append([first.setdefault(key[:depth], number) for depth in range(1, len(key) + 1)])
    return [cases[number] for number in sorted(range(len(cases)), key=lambda number: (ranks[number], number))]


def loads_of(cases: Sequence[SweepCase]) -> list[list[str]]:
    """The networks that a worker loads for each of the cases, one after another in this order."""
    loads: list[list[str]] = []
    before: dict[str, Hashable] = {}
    for case in cases:
        needs = case.needs()
        is_new = needs["resources"] != before.get("resources")
        loads.append([name for name in needs if name != "resources" and (is_new or needs[name] != before.get(name))])
        before = needs
    return loads


def plan_cases(cases: Sequence[SweepCase], backend: Backend, display: Display) -> None:
    """Plan the cases that have no plan; cases with the same rows and canvases are planned once.

    `cases` are all that can run: the plan of a finished one serves others too. A case that can't be planned fails, and so do
    those that would share its plan.
    """
    for group in plan_groups([case.resolved for case in cases]):
        members = [cases[number] for number in group]
        donor = next((case.plan for case in members if case.plan is not None), None)
        copies = 0
        for case in (member for member in members if member.plan is None and member.is_ready):
            copies += donor is not None
            try:
                with hold_lease(case.store, StopFlag().set) as lease:
                    if donor is None or load_plan(case.store) is not None:
                        survey = backend.survey(case.resolved, display)
                        case.plan = make_plan(case.resolved, case.store, display, epoch=lease.epoch, survey=survey)
                    else:
                        case.plan = copy_plan(case.resolved, donor, case.store, epoch=lease.epoch)
            except LeaseHeld as error:
                case.fail(INTERRUPTED, error)
            except UserError as error:
                for other in members:
                    if other.plan is None and other.is_ready:
                        other.fail(UNUSABLE, error)
                break
            donor = donor or case.plan
        if copies:
            display.note(f"planned: {counted(copies, 'more case')} with the same rows: the plan was copied")
