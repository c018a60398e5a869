"""`draftmill status`, `list` and `logs`: look at runs, by their directories alone, and write nothing.

status shows the progress of a run, list the runs below a folder, and logs the events of a run and its later passes, by time.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from draftmill.jobs.drive.run_log import read_sessions
from draftmill.jobs.drive.totals import DeviceSums, device_time_rows, efficiency, exactness, ratio
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted, duration, rate_text, table_lines
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.results.passes import (
    FOLDER,
    PRUNED,
    NoPlanYet,
    count_failed,
    passes_of,
    require_plan,
)
from draftmill.jobs.results.runs import facts_of, runs_below
from draftmill.jobs.results.summary import metric_lines
from draftmill.storage.errors import StoreError, UserError, printable
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import SUCCESS, done_units, is_closed, read_manifest
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.stores.interface import Place, Stat, Store, level_of
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import open_store

_log = logging.getLogger(__name__)


def status(place: Place) -> int:
    """Print done, running and failed units and samples, the rate and the remaining time; returns the exit code."""
    store = open_store(place)
    try:
        plan = require_plan(store)
    except NoPlanYet as state:
        print(state)
        return OK
    lines = [f"{store.url}: {plan.spec.name}", *status_lines(store, plan)]
    later = passes_of(store)[1:] if store.exists(SUCCESS) else []
    for part in later:
        done = (
            f"{len(done_units(part.store)):,} of {part.plan.units:,} units done; `draftmill rerun --failed` resumes it"
        )
        if part.manifest is not None:
            done = f"finished: {part.plan.rows:,} samples again, {count_failed([part]):,} of them failed"
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
    if store.exists(PRUNED):
        yield "  state    finished; its results were deleted by `draftmill prune`"
        yield f"  samples  {plan.rows:,} of {plan.rows:,} done (100.0%), {failed} failed"
        return
    done, driver = done_units(store), driver_of(store)
    rows = sum(size.rows for size in plan.sizes() if size.unit in done)
    running = 0 if driver is None else min(plan.units - len(done), sessions.units_held)
    rows = min(plan.rows, rows + sessions.rows_open) if running else rows
    yield f"  state    {state_of(store, driver)}"
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
        yield f"  ETA      {duration((plan.rows - rows) / rate)} of decoding"


def device_time_lines(stores: Sequence[Store], *, is_running: bool) -> list[str]:
    """The device time of all passes so far; of a running session it is known what is in progress."""
    sessions = [read_sessions(store) for store in stores]
    sums = sum((session.devices for session in sessions), DeviceSums())
    sums = replace(sums, unended=max(0.0, sums.unended - is_running))
    rows = device_time_rows(sums, open_s=sessions[-1].open_s if is_running else 0.0)
    return [f"  {label:<13}{text}" for label, text in rows]


def state_of(store: Store, driver: str | None) -> str:
    """The run's state, in words."""
    if is_closed(store):
        return "finished"
    return f"running, driver {driver}" if driver else "not running; `draftmill run` resumes it"


def list_runs(folder: Place, *, as_json: bool = False) -> int:
    """Print the runs below a folder, a line for each; returns the exit code. UserError if nothing is there."""
    store = open_store(folder)
    found = runs_below(store)
    if not found:
        level = level_of(store)
        if not level.folders and not level.files:
            raise UserError(f"nothing is at {store.url}")
    runs = [promise.result() for _, promise in parallel_map(store, found, facts_of)]
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
            rest = f"{facts.units_done:,} of {facts.units:,} units done{driver}"
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
    for folder in ["", *(f"{FOLDER}{name}/" for name in sorted(level_of(store, FOLDER.rstrip("/")).folders))]:
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
