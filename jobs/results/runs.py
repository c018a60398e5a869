"""The runs below a folder, found level by level without listing their units, and the facts of each, read without its results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from draftmill.jobs.config.dates import base_of, below_base, date_in, depth_of, format_date, read_date
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.exit_codes import hopeless, too_many_failed
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.results.passes import PRUNED, count_failed, is_unplanned, passes_of
from draftmill.storage.errors import DamagedRun
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import MANIFEST, SUCCESS, done_units
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import FolderLevel, Place, Stat, Store, level_of
from draftmill.storage.stores.parallel import thread_pool
from draftmill.storage.stores.store import open_store

MOST_LEVELS = 12
"""How deep runs are searched for; a folder tree below that is not one of runs."""

THREADS = 16


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run directory: its name below the folder that was searched (empty for the folder itself), and its own level.

    The names of the level's Stats begin at the folder that was searched.
    """

    name: str
    store: Store
    level: FolderLevel

    @property
    def success(self) -> Stat | None:
        """The facts of `_SUCCESS` of a finished run, None for others."""
        is_finished = PLAN in self.level.files and MANIFEST in self.level.files
        return self.level.files.get(SUCCESS) if is_finished else None


def runs_below(store: Store, *, levels: int = MOST_LEVELS) -> list[FoundRun]:
    """Every run directory at most `levels` below a folder, sorted by name; the folder itself if it is one.

    A folder with `_lease.json` that holds nothing else but parts of a plan is a run that is being planned, or was.
    """
    with thread_pool(THREADS, "levels") as threads:
        runs: list[FoundRun] = []
        names = [""]
        for depth in range(levels + 1):
            listed = zip(names, threads.map(lambda name: level_of(store, name), names), strict=True)
            names = []
            for name, level in listed:
                if PLAN in level.files or (name and is_unplanned(level)):
                    place = open_store(store.place.below(name)) if name else store
                    runs.append(FoundRun(name, place, level))
                elif depth < levels:
                    inner = [folder for folder in level.folders if folder[:1] not in "._"]  # on S3 a name may be empty
                    names += [f"{name}/{folder}" if name else folder for folder in inner]
    return sorted(runs, key=lambda run: run.name)


def runs_of(place: Place) -> dict[datetime, FoundRun]:
    """The runs of a recurring job, by date; `place` is its output path with the date. Other folders are ignored."""
    runs = runs_below(base_store(place), levels=depth_of(place.url))
    dated = {date_in(below_base(place.url), run.name): run for run in runs}
    return {date: dated[date] for date in sorted(date for date in dated if date is not None)}


def base_store(place: Place) -> Store:
    """The folder above the date in an output path: that of all runs of a recurring job."""
    return open_store(place.at(base_of(place.url)))


def finished_runs(base: Store) -> list[FoundRun]:
    """Every finished run below the base path, whatever its name: the base belongs to this job alone."""
    return [run for run in runs_below(base) if run.success is not None]


State = Literal["finished", "failed", "running", "interrupted", "damaged"]
"""failed: too many samples failed (exit code 3). interrupted: not finished, and no driver works on it."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run; facts are None where they are not known. `is_pruned`: its results were deleted.

    `failed` counts the samples that are still failed after the last finished pass.
    """

    run: str
    name: str
    job: str | None = None
    state: State = "interrupted"
    logical_date: str | None = None
    planned_at: str | None = None
    units: int | None = None
    units_done: int | None = None
    samples: int | None = None
    failed: int | None = None
    driver: str | None = None
    is_success: bool = False
    is_pruned: bool = False

    @property
    def date(self) -> str | None:
        """The logical date, or else when it was planned."""
        return self.logical_date or self.planned_at


def facts_of(run: FoundRun) -> RunFacts:
    """The facts of a run."""
    driver, stat = driver_of(run.store), run.level.files.get(PLAN)
    planned_s = None if stat is None else stat.mtime_s
    facts = RunFacts(
        run.store.url,
        run.name or ".",
        state="running" if driver else "interrupted",
        planned_at=None if planned_s is None else format_date(datetime.fromtimestamp(planned_s, UTC)),
        driver=driver,
        is_success=run.success is not None,
        is_pruned=PRUNED in run.level.files,
    )
    try:
        plan = load_plan(run.store)
        if plan is None:
            return facts
        date, state = plan.spec.output.logical_date, facts.state
        if run.success is None:
            failed, done = None, len(done_units(run.store))
            if not driver and hopeless(read_sessions(run.store).committed.failed, plan.rows, plan.spec.errors):
                state = "failed"
        else:
            pruned = parse_json(run.store.get(PRUNED)) if facts.is_pruned else None
            failed, done = int(pruned["failed"]) if pruned else count_failed(passes_of(run.store)), plan.units
            state = "failed" if too_many_failed(failed, plan.rows, plan.spec.errors) else "finished"
        return replace(
            facts,
            job=plan.spec.name,
            state=state,
            logical_date=None if date is None else format_date(read_date(date)),
            units=plan.units,
            units_done=done,
            samples=plan.rows,
            failed=failed,
        )
    except (ValueError, KeyError, TypeError, DamagedRun):  # a UserError is a ValueError
        return replace(facts, state="damaged")
