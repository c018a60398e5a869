"""The attempts log, RUN/attempts/*.jsonl: which worker tried which unit, when, and why it failed. Best effort.

A failure to write the log never stops a job. An object store can't append, so a log is a series of files, each rewritten
until it is full:

    attempts/epoch-0003-part-0000.jsonl     one line per receipt, failure, death or quarantine
    attempts/epoch-0003-session.jsonl       one line: the sums of this driver's session so far
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from draftmill.actors.messages import Effort, Tally
from draftmill.decoders.base import EngineStats
from draftmill.jobs.driving.cost import DeviceSums
from draftmill.jobs.driving.line_files import LineFiles
from draftmill.jobs.driving.totals import Totals, add_effort
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.secrets import redacted
from draftmill.storage.stores.interface import Store

FLUSH_EVERY_S = 10.0


class AttemptsLog:
    """Collects lines and writes them every FLUSH_EVERY_S seconds."""

    def __init__(self, store: Store, epoch: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._prefix = f"attempts/epoch-{epoch:04d}"
        self._clock = clock
        self._lines = LineFiles(store, self._prefix)
        self._flushed_s = clock()
        self._is_said = False

    def add(self, what: str, **facts: Any) -> None:
        """Add one line with the event's name, `what`, and its facts."""
        told = {name: redacted(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        self._lines.add(json.dumps({"at_s": round(time.time(), 3), "what": what, **told}, default=str))

    def maybe_flush(self, totals: Totals) -> None:
        """Flush, if the last flush was at least FLUSH_EVERY_S seconds ago, or the first worker has come up since."""
        is_first = totals.started_s is not None and not self._is_said
        if is_first or self._clock() - self._flushed_s >= FLUSH_EVERY_S:
            self.flush(totals)

    def flush(self, totals: Totals) -> None:
        """Write new lines and the session's sums."""
        self._flushed_s = self._clock()
        self._is_said = totals.started_s is not None
        try:
            self._lines.flush()
            if totals.started_s is not None:
                record = json.dumps(session_record(totals)) + "\n"
                self._store.put(f"{self._prefix}-session.jsonl", record.encode())
        except StoreError:
            return  # best effort: the results don't depend on the log


@dataclasses.dataclass(frozen=True, slots=True)
class Sessions:
    """The sums over all recorded sessions of a run; `worker_s` is worker seconds, `wall_s` the drivers' clock.

    `units_held` is how many units workers held at the latest session's last record, and `open_s` how many worker seconds it had
    spent on units that were not committed yet. `started_on` counts the workers that came up, by what they compute with.
    """

    wall_s: float = 0.0
    worker_s: float = 0.0
    committed: Tally = dataclasses.field(default_factory=Tally)
    effort: Effort = dataclasses.field(default_factory=Effort)
    units_held: int = 0
    exact: bool | None = None
    devices: DeviceSums = dataclasses.field(default_factory=DeviceSums)
    open_s: float = 0.0
    started_on: Counter[str] = dataclasses.field(default_factory=Counter)


def session_record(totals: Totals) -> dict[str, Any]:
    """The record of a session, for the log."""
    return {
        "wall_s": totals.wall_s,
        "worker_s": totals.worker_s,
        "units_held": totals.units_held,
        "exact": totals.exact,
        "committed": dataclasses.asdict(totals.committed),
        "effort": dataclasses.asdict(totals.effort),
        "devices": dataclasses.replace(totals.devices.sums, unended=float(totals.ended_s is None)).to_json(),
        "started_on": totals.started_on,
    }


def read_sessions(store: Store) -> Sessions:
    """Sum up the recorded sessions; skips records that can't be read."""
    total = Sessions()
    for stat in store.list("attempts/"):
        if not stat.name.endswith("-session.jsonl"):
            continue
        try:
            total = _add(total, json.loads(store.get(stat.name)))
        except (ValueError, KeyError, TypeError, StoreError):
            continue
    return total


def _add(total: Sessions, record: dict[str, Any]) -> Sessions:
    effort = record["effort"]
    devices = DeviceSums.from_json(record["devices"]) if "devices" in record else DeviceSums()
    spent = Effort(EngineStats(**effort["engine"]), effort["wall_s"], effort["tail_s"])
    return Sessions(
        total.wall_s + record["wall_s"],
        total.worker_s + record["worker_s"],
        total.committed + Tally(**record["committed"]),
        add_effort(total.effort, spent),
        record["units_held"],
        record.get("exact") if not total.committed.rows else all_exact((total.exact, record.get("exact"))),
        total.devices + devices,
        devices.open_s,
        total.started_on + Counter(record.get("started_on", {})),
    )
