"""Runs by their directories alone: those below a folder, the facts of each, and `draftmill status` and `logs`.

Runs are found level by level without listing their units; facts are read without results. Nothing is written.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from draftmill.jobs.config.dates import base_of, below_base, date_in, depth_of, format_date, read_date
from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.drive.totals import DeviceSums, device_time_rows, efficiency, exactness, ratio, time_left_s
from draftmill.jobs.exit_codes import OK, failed_text, hopeless, too_many_failed
from draftmill.jobs.formatting import counted, duration, rate_text, table_lines
from draftmill.jobs.plan.plan import Plan, load_plan
from draftmill.jobs.results.passes import (
    FOLDER,
    PRUNED,
    NoPlanYet,
    count_failed,
    is_unplanned,
    passes_of,
    require_plan,
)
from draftmill.jobs.results.summary import metric_lines
from draftmill.storage.errors import DamagedRun, StoreError, UserError, printable
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import MANIFEST, SUCCESS, done_units, read_manifest
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.parallel import parallel_map, thread_pool
from draftmill.storage.stores.store import FolderLevel, Place, Stat, Store, open_store

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
            listed = zip(names, threads.map(store.level, names), strict=True)
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


# ---- what is printed: the progress of a run, the runs below a folder, the events of a run and its later passes by time

_log = logging.getLogger(__name__)


def status(place: Place, *, as_json: bool = False) -> int:
    """Print a run's done, running and failed units and samples, its rate and remaining time; of another folder, or `as_json`,
    the facts of each run below. Returns the exit code."""
    store = open_store(place)
    level = store.level()
    if as_json or not (PLAN in level.files or is_unplanned(level)):
        return list_runs(store, level, as_json=as_json)
    try:
        plan = require_plan(store)
    except NoPlanYet as state:
        print(state)
        return OK
    lines = [f"{store.url}: {plan.spec.name}", *status_lines(store, plan)]
    later = passes_of(store)[1:] if store.exists(SUCCESS) else []
    for part in later:
        units = f"{len(done_units(part.store)):,} of {counted(part.plan.units, 'unit')}"
        done = f"{units} done; `draftmill rerun --failed` resumes it"
        if part.manifest is not None:
            done = f"finished: {counted(part.plan.rows, 'sample')} again, {count_failed([part]):,} of them failed"
        lines.append(f"  pass {part.number}   {done}")
    lines += device_time_lines([store, *(part.store for part in later)], is_running=driver_of(store) is not None)
    if metrics := metric_lines(store, plan.rows):
        lines += ["  metrics", *(f"  {line}" for line in metrics)]
    print("\n".join(lines))
    return OK


def status_lines(store: Store, plan: Plan) -> Iterator[str]:
    """The report, line by line."""
    manifest, sessions = read_manifest(store), read_sessions(store)
    failed = manifest.total("failed") if manifest else sessions.committed.failed
    facts = facts_of(FoundRun("", store, store.level()))
    if facts.is_pruned:
        yield f"  state    {facts.state}; its results were deleted by `draftmill prune`"
        yield f"  samples  {plan.rows:,} of {plan.rows:,} done (100.0%), {failed} failed"
        return
    done, driver = done_units(store), facts.driver
    rows = sum(size.rows for size in plan.sizes() if size.unit in done)
    running = 0 if driver is None else min(plan.units - len(done), sessions.units_held)
    rows = min(plan.rows, rows + sessions.rows_open) if running else rows
    more = "; `draftmill run` resumes it" if facts.state == "interrupted" else f", driver {driver}" if driver else ""
    if facts.state == "failed":
        more = f": {failed_text(facts.failed or failed, plan.rows, plan.spec.errors)}"
    yield f"  state    {facts.state}{more}"
    yield f"  units    {len(done):,} done, {running:,} running, {plan.units - len(done) - running:,} to go"
    yield f"  samples  {rows:,} of {plan.rows:,} done ({ratio(rows, plan.rows):.1%}), {failed} failed"
    for text, count in sessions.started_on.items():
        yield f"  workers  {count:,} started on {text}"
    if done:
        yield f"  exact    {exactness(manifest.exact if manifest else sessions.exact)}"
    rate = ratio(sessions.rows_ended, sessions.wall_s)
    if rate:
        yield f"  rate     {rate:,.1f} samples/s, {rate_text(ratio(sessions.tokens, sessions.wall_s))} tokens/s"
    if shared := efficiency(sessions.effort).get("prompts_shared"):
        yield f"  prompts  {shared:.1%} of their rows taken over from other samples, not computed"
    if rate and rows < plan.rows:
        failures = sum(plan.totals.errors.values())
        eta_s = time_left_s(plan.rows - rows, sessions.rows_ended, sessions.wall_s, failed, failures)
        yield f"  ETA      {'-' if eta_s is None else duration(eta_s)} of decoding"


def device_time_lines(stores: Sequence[Store], *, is_running: bool) -> list[str]:
    """The device time of all passes so far; of a running session it is known what is in progress."""
    sessions = [read_sessions(store) for store in stores]
    sums = sum((session.devices for session in sessions), DeviceSums())
    sums = replace(sums, unended=max(0.0, sums.unended - is_running))
    rows = device_time_rows(sums, open_s=sessions[-1].open_s if is_running else 0.0)
    return [f"  {label:<13}{text}" for label, text in rows]


def list_runs(store: Store, level: FolderLevel, *, as_json: bool) -> int:
    """Print the runs below a folder, a line for each; returns the exit code. UserError if nothing is there, or no run; `as_json`
    a folder without runs is an empty list, which a script can count before the first run."""
    found = runs_below(store)
    if not found and not (as_json and (level.folders or level.files)):
        is_empty = not level.folders and not level.files
        raise UserError(f"nothing is at {store.url}" if is_empty else f"no run is at or below {store.url}: no {PLAN}")
    runs = [promise.result() for _, promise in parallel_map(found, facts_of)]
    if as_json:
        print(json.dumps([asdict(facts) for facts in runs], indent=1))
        return OK
    rows = []
    for facts in runs:
        date = (facts.date or "-").removesuffix("T00:00:00Z").replace("T", " ").replace("Z", " UTC")
        driver = f", driver {facts.driver}" if facts.driver else ""
        samples = "" if facts.samples is None else counted(facts.samples, "sample")
        if facts.state == "damaged":
            rest = f"`draftmill status {facts.run}` says what is damaged"
        elif facts.samples is None:
            rest = f"being planned{driver}"
        elif facts.failed is None:
            rest = f"{facts.units_done:,} of {counted(facts.units or 0, 'unit')} done{driver}"
        else:
            rest = f"{facts.failed:,} failed{'; results were pruned' if facts.is_pruned else ''}"
        rows.append([facts.name, facts.state, date, samples, rest])
    print("\n".join([f"{store.url}: {counted(len(runs), 'run')}", *table_lines(rows)]))
    return OK


POLL_S = 2.0

Event = dict[str, Any]

Read = dict[str, tuple[int, str]]
"""How many lines of each file are known, and the etag that it had then."""


def logs(place: Place, *, as_json: bool = False, follow: bool = False) -> int:
    """Print the run's events; with `follow`, new ones too, until no driver works on the run. Returns the exit code.

    Prints why a run has no plan; with `follow`, waits for a plan that is being made.
    """
    store = open_store(place)
    printed = ""
    while True:
        try:
            require_plan(store)
            break
        except NoPlanYet as state:
            if str(state) != printed:
                printed = str(state)
                _log.warning(printed)
            if state.driver is None or not follow:
                return OK
        time.sleep(POLL_S)
    read: Read = {}
    while True:
        is_last = not follow or driver_of(store) is None
        for event in events_of(store, read):
            print(json.dumps(event, ensure_ascii=False) if as_json else line_of(event), flush=follow)
        if is_last:
            return OK
        time.sleep(POLL_S)


def events_of(store: Store, read: Read | None = None) -> Iterator[Event]:
    """The events of every pass in the order of time; skips those of `read`, and updates it."""
    known = {} if read is None else read
    streams: dict[str, list[Stat]] = {}
    for folder in ["", *(f"{FOLDER}{name}/" for name in sorted(store.level(FOLDER.rstrip("/")).folders))]:
        for stat in store.list(f"{folder}attempts/"):
            if stat.name.endswith(".jsonl") and "-part-" in stat.name:
                streams.setdefault(stat.name.partition("-part-")[0], []).append(stat)
    read_all = [_stream(store, files, known) for files in streams.values()]
    yield from heapq.merge(*read_all, key=lambda event: str(event["time"]))


def _stream(store: Store, files: list[Stat], known: Read) -> Iterator[Event]:
    for stat in files:
        count, etag = known.get(stat.name, (0, ""))
        if stat.etag == etag:
            continue
        try:
            lines = store.get(stat.name).decode(errors="replace").split("\n")[:-1]  # each has its line end
        except StoreError:
            continue  # best effort, like the log itself
        known[stat.name] = len(lines), stat.etag
        for line in lines[count:]:
            with suppress(ValueError):
                event = parse_json(line)
                if isinstance(event, dict) and {"time", "level", "event"} <= event.keys():
                    yield event


def line_of(event: Event) -> str:
    """An event as one line for people."""
    own = {"time", "level", "run", "event", "message", "summary", "facts"}
    facts = [
        f"{name}={fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)}"
        for name, fact in event.items()
        if name not in own
    ]
    message = [str(event["message"])] if event.get("message") else []
    text = " ".join([*message, *facts] if event["event"] not in {"note", "progress"} else message or facts)
    return printable(f"{event['time']}  {event['level']:<7}  {event['event']:<14}  {text}").rstrip()
