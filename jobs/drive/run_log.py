"""The log of a run, RUN/attempts/*.jsonl: what happened to units and workers, notes to the user, progress. Best effort.

An object store can't append, so a log is a series of files, the last of which is rewritten until it is full:

    attempts/epoch-0003-part-0000.jsonl     one event a line (jobs/drive/log.py)
    attempts/epoch-0003-session.jsonl       one line: the sums of this driver's session so far

Nothing is written before the log is attached: a run that is refused leaves no trace. No job stops or waits because of its log:
threads write it, one after the other, however long the store takes; only at the end the driver waits for the last one, for
at most `patience_s` in all.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from draftmill.actors.messages import Effort, Tally
from draftmill.jobs.drive.log import LOST, JsonLines, event_record
from draftmill.jobs.drive.totals import DeviceSums, Totals, progress_facts
from draftmill.storage.errors import StoreError
from draftmill.storage.json_text import parse_as, shaped
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.unit_facts import CommittedUnit
from draftmill.storage.stores.store import Store

FLUSH_EVERY_S = 10.0
PROGRESS_EVERY_S = 60.0
LINES_PER_FILE = 2000
MOST_LINES = 100_000
"""Lines that wait for the store, at most; later ones are only counted."""

PATIENCE_S = 60.0
"""Seconds to wait for the store at the end of a run, and of one that is interrupted."""
INTERRUPTED_S = 3.0


class RunLog(logging.Handler):
    """Takes records, from any thread; once attached to a run, threads write them every FLUSH_EVERY_S and at the end."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._facts: dict[str, Any] = {}
        self.setFormatter(JsonLines("note", self._facts))
        self._store: Store | None = None
        self._prefix = ""
        self._part = 0
        self._lines: list[str] = []
        self._written = 0
        """How many of the lines the last file has: other threads may add lines at any time, so no flag could tell."""
        self._dropped = self._first = 0
        self._flushed_s = self._progress_s = clock()
        self._session = ""
        """The sums as of the last flush, "" before the first worker has come up."""
        self._writer: threading.Thread | None = None
        self._lost: set[str] = set()
        self.patience_s = PATIENCE_S

    def attach(self, store: Store, epoch: int, run: str) -> None:
        """Write from now on into this run directory, as the driver with this epoch; earlier events go there too."""
        self._store, self._facts["run"], self._prefix = store, run, f"attempts/epoch-{epoch:04d}"

    @property
    def is_attached(self) -> bool:
        """Whether it belongs to a run: from then on the run directory is not what it was before."""
        return self._store is not None

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) - self._written >= MOST_LINES:
            self._dropped += 1
        else:
            self._lines.append(self.format(record))

    def add(self, event: str, message: str | None = None, *, level: int = logging.INFO, **facts: Any) -> None:
        """Add an event that is for this log alone."""
        self.handle(event_record(event, message, level=level, **facts))

    def show(self, totals: Totals) -> None:
        """Note the progress every PROGRESS_EVERY_S; flush every FLUSH_EVERY_S, at the first worker, and at the first unit."""
        if self._clock() - self._progress_s >= PROGRESS_EVERY_S:
            self._progress_s = self._clock()
            self.add("progress", **progress_facts(totals))
        first = (totals.started_s is not None) + (totals.units_done > 0)
        if first > self._first or self._clock() - self._flushed_s >= FLUSH_EVERY_S:
            self._first = first
            self._start_writing(totals)

    def write_out(self, totals: Totals | None = None) -> None:
        """Write new events and the session's sums, if the log is attached; waits for the store while there is patience."""
        for _ in range(2):  # what is being written may lack the last events
            began_s = self._clock()
            self._start_writing(totals)
            if self._writer is not None:
                self._writer.join(self.patience_s)
            self.patience_s = max(0.0, self.patience_s - (self._clock() - began_s))

    def _start_writing(self, totals: Totals | None) -> None:
        """Start to write what is new, unless that is being done."""
        self._flushed_s = self._clock()
        for name in sorted(LOST.keys() - self._lost):
            self._lost.add(name)
            self.add(
                "note", f"{name} can't be written any more, the run continues: {LOST[name]}", level=logging.WARNING
            )
        if totals is not None and totals.started_s is not None:
            self._session = json.dumps(session_record(totals)) + "\n"
        if self._store is not None and not (self._writer is not None and self._writer.is_alive()):
            self._writer = threading.Thread(target=self._write, args=(self._store,), name="log", daemon=True)
            self._writer.start()

    def _write(self, store: Store) -> None:
        session = self._session
        with suppress(Exception):  # best effort, on a thread of its own: the results don't depend on the log
            self._write_lines(store)
            if session:
                store.put(f"{self._prefix}-session.jsonl", session.encode())

    def _write_lines(self, store: Store) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            message = f"{dropped:,} events are not here: the store took too long"
            self._lines.append(self.format(event_record("note", message, level=logging.WARNING)))
        lines = self._lines[:]
        if len(lines) == self._written:
            return
        store.put(f"{self._prefix}-part-{self._part:04d}.jsonl", ("\n".join(lines) + "\n").encode())
        self._written = len(lines)
        if self._written >= LINES_PER_FILE:
            self._part += 1
            del self._lines[: self._written]
            self._written = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sessions:
    """The sums of a driver's session, or over all recorded sessions of a run; `wall_s` is the drivers' clock.

    `rows_ended` and `tokens` are of all samples that ended. Of the latest session's last record are `units_held` by workers, and
    `open_s` and `rows_open`, the worker seconds and ended samples of units that were not committed yet. `started_on` counts the
    workers that came up, by what they compute with.
    """

    wall_s: float = 0.0
    worker_s: float = 0.0
    committed: Tally = dataclasses.field(default_factory=Tally)
    effort: Effort = dataclasses.field(default_factory=Effort)
    units_held: int = 0
    exact: bool | None = None
    devices: DeviceSums = dataclasses.field(default_factory=DeviceSums)
    open_s: float = 0.0
    rows_ended: int = 0
    rows_open: int = 0
    tokens: int = 0
    started_on: dict[str, int] = dataclasses.field(default_factory=dict)

    def __add__(self, later: Sessions) -> Sessions:
        summed = ("wall_s", "worker_s", "committed", "effort", "devices", "rows_ended", "tokens")
        return dataclasses.replace(
            later,
            **{name: getattr(self, name) + getattr(later, name) for name in summed},
            exact=all_exact((self.exact, later.exact)) if self.committed.rows else later.exact,
            started_on=Counter(self.started_on) + Counter(later.started_on),
        )


def session_record(totals: Totals) -> dict[str, Any]:
    """The record of a session, for the log: its Sessions as JSON data."""
    devices = dataclasses.replace(totals.devices, unended=float(totals.ended_s is None))
    ended = totals.rows_done - totals.rows_before
    alike = ("wall_s", "worker_s", "committed", "effort", "units_held", "exact", "tokens")
    session = Sessions(
        **{name: getattr(totals, name) for name in alike},
        devices=devices,
        open_s=devices.open_s,
        rows_ended=ended,
        rows_open=max(0, ended - totals.committed.rows),
        started_on=dict(totals.started_on),
    )
    return dataclasses.asdict(session)


def read_sessions(store: Store) -> Sessions:
    """Sum up the recorded sessions; skips records that can't be read."""
    total = Sessions()
    for stat in store.list("attempts/"):
        if stat.name.endswith("-session.jsonl"):
            with suppress(ValueError, StoreError):
                total += parse_as(Sessions, store.get(stat.name))
    return total


def logged_units(store: Store) -> Iterator[CommittedUnit]:
    """The facts of units as the logs have them; skips what can't be read. Each may be of a file that is gone."""
    for stat in store.list("attempts/"):
        with suppress(StoreError):
            lines = store.get(stat.name).splitlines() if "-part-" in stat.name else []
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    if event["event"] == "done":
                        facts = event["facts"]
                        yield shaped(
                            CommittedUnit, {**facts, "sums": json.dumps(facts["sums"]) if facts["sums"] else ""}
                        )
