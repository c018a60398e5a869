"""`draftmill logs`: prints the log of a run (jobs/driving/run_log.py) and of its later passes, by time. Writes nothing."""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from draftmill.jobs.exit_codes import OK
from draftmill.jobs.finished.passes import FOLDER, NoPlanYet, require_plan
from draftmill.storage.errors import StoreError, printable
from draftmill.storage.runs.lease import driver_of
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import S3Options, Stat, Store
from draftmill.storage.stores.store import open_store

POLL_S = 2.0

Event = dict[str, Any]

Read = dict[str, tuple[int, str]]
"""How many lines of each file are known, and the etag that it had then."""


def logs(run_dir: str, *, as_json: bool = False, follow: bool = False, s3: S3Options | None = None) -> int:
    """Print the run's events; with `follow`, new ones too, until no driver works on the run. Returns the exit code."""
    store = open_store(run_dir, s3=s3)
    if not _has_plan(store, follow=follow):
        return OK
    shown = line_of if not as_json else json_of
    read: Read = {}
    while True:
        is_last = not follow or driver_of(store) is None
        for event in events_of(store, read):
            print(shown(event), flush=follow)
        if is_last:
            return OK
        time.sleep(POLL_S)


def _has_plan(store: Store, *, follow: bool) -> bool:
    """Whether the run has a plan; if not, stderr says why. With `follow`, a plan that is being made is waited for."""
    said = False
    while True:
        try:
            require_plan(store)
            return True
        except NoPlanYet as state:
            is_over = state.driver is None or not follow
            if is_over or not said:
                print(f"draftmill: {state}", file=sys.stderr)
            if is_over:
                return False
            said = True
        time.sleep(POLL_S)


def events_of(store: Store, read: Read | None = None) -> Iterator[Event]:
    """The events in the order of time; those of `read` are left out, and it is updated."""
    known = {} if read is None else read
    streams: dict[str, list[Stat]] = {}
    for stat in log_files(store):
        if stat.name.endswith(".jsonl") and "-part-" in stat.name:
            streams.setdefault(stat.name.partition("-part-")[0], []).append(stat)
    read_all = [_stream(store, files, known) for files in streams.values()]
    yield from heapq.merge(*read_all, key=lambda event: str(event["time"]))


def log_files(store: Store) -> Iterator[Stat]:
    """The files of the log, of every pass."""
    folder, number = "", 1
    while number == 1 or store.exists(folder + PLAN):
        yield from store.list(f"{folder}attempts/")
        number += 1
        folder = f"{FOLDER}{number:04d}/"


def _stream(store: Store, files: list[Stat], known: Read) -> Iterator[Event]:
    """The events of one driver's log, file by file."""
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
            event = _event(line)
            if event is not None:
                yield event


def _event(line: str) -> Event | None:
    """The event in a line; None if it is damaged."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and {"time", "level", "event"} <= set(content) else None


def json_of(event: Event) -> str:
    """An event as one line of JSON."""
    return json.dumps(event, ensure_ascii=False)


def line_of(event: Event) -> str:
    """An event as one line for people."""
    rest = {
        name: fact
        for name, fact in event.items()
        if name not in {"time", "level", "run", "event", "message", "summary"}
    }
    facts = [f"{name}={_fact_text(fact)}" for name, fact in rest.items()]
    message = [str(event["message"])] if event.get("message") else []
    text = " ".join([*message, *facts] if event["event"] not in {"note", "progress"} else message or facts)
    return printable(f"{event['time']}  {event['level']:<7}  {event['event']:<14}  {text}").rstrip()


def _fact_text(fact: Any) -> str:
    return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)
