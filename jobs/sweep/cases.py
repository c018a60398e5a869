"""The cases of a sweep as jobs: checked, put into an order in which models stay loaded, and planned together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.actors.loop.loading import fetch_drafter, network_keys
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.config.sweep_spec import CaseSpec
from draftmill.jobs.drive.backend import Backend
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.leases import hold_lease
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.exit_codes import INTERRUPTED, OK, TOO_MANY_FAILED, UNUSABLE
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.earlier_runs import FIELD, LAST
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import Resolved, remembering, resolve
from draftmill.jobs.plan.shared_plan import copy_plan, plan_groups
from draftmill.jobs.results.measure import CheckedMetrics, ready_for, units_to_measure
from draftmill.storage.errors import UNUSABLE_ERRORS, UserError
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.runs.lease import LeaseHeld
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import open_store


@dataclass(slots=True)
class SweepCase:
    """A case that can run. `plan` is None until it is planned; `code` is its exit code, None while it has not ended.

    `is_closed` says that it was decoded before this command started. `problem` is why it can't run after all. `metrics` are
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
        """The case's spec."""
        return self.resolved.spec

    @property
    def is_ready(self) -> bool:
        """Whether it has units to decode, as far as is known."""
        return not self.is_closed and self.code is None

    def lacks_metrics(self) -> bool:
        """Whether all of its units are committed, and some of them lack metrics."""
        is_decoded = self.problem is None and (self.is_closed or self.code in {OK, TOO_MANY_FAILED})
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
    loaders = remembering()
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
            resolved = resolve(spec, store, display, loaders=loaders)
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
            field=FIELD,
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
                case.plan = _plan_case(case, donor, backend, display)
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


def _plan_case(case: SweepCase, donor: Plan | None, backend: Backend, display: Display) -> Plan:
    with hold_lease(case.store, StopFlag().set) as lease:
        if donor is None or load_plan(case.store) is not None:
            survey = backend.survey(case.resolved, display)
            return make_plan(case.resolved, case.store, display, epoch=lease.epoch, survey=survey)
        return copy_plan(case.resolved, donor, case.store, epoch=lease.epoch)
