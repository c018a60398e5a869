"""`draftmill prune`: deletes the results of old runs of a recurring job, and keeps what proves that their inputs are done.

Without --yes it only says what it would delete.

Of a finished run stay `_plan.json` and `_SUCCESS`, by which `input.since` knows its inputs, `_ids.parquet`, by which
`input.dedupe` knows its ids, `_manifest.json` with the hashes of what was there, and the sums of its sessions. `_pruned.json` is
written before anything is deleted, so that no run without results is taken for a damaged one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from draftmill.jobs.config.dates import format_date, read_date
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.drive.leases import base_lease, hold_lease
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.formatting import counted, size_text, table_lines
from draftmill.jobs.results.passes import PRUNED, count_failed, passes_of
from draftmill.jobs.results.runs import FoundRun, RunFacts, facts_of, runs_below
from draftmill.jobs.run.since import IDS, ok_ids
from draftmill.storage.errors import UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.parquet import write_parquet
from draftmill.storage.runs.lease import LEASE, LeaseHeld
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.store import AlreadyExists, Place, Stat, Store, open_store

_log = logging.getLogger(__name__)

FOLDERS = ("data/", "traces/", "metrics/", "passes/", "plan/", "input/", "attempts/", "log/")
"""What a run consists of beside its bookkeeping. Anything else in its folder is not ours, and stays."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run, and why it stays; if `stays` is None, its `objects` are deleted."""

    run: FoundRun
    facts: RunFacts
    stays: str | None
    objects: list[Stat] = field(repr=False)


def candidates(base: Store, keep: Sequence[int | timedelta], now: datetime) -> list[Candidate]:
    """Every run below the base path, oldest first, and whether it goes.

    A number in `keep` is that of the newest runs, which stay; a time is the age from which runs go.
    """
    count = max((value for value in keep if isinstance(value, int)), default=0)
    age = max((value for value in keep if isinstance(value, timedelta)), default=None)
    runs = [(run, facts_of(run)) for run in runs_below(base) if run.name]
    runs.sort(key=lambda pair: (pair[1].date or "", pair[0].name))
    free = [facts.name for _, facts in runs if not facts.is_pruned and not _obstacle(facts)]
    newest = set(free[-count:] if count else ())
    chosen = []
    for run, facts in runs:
        stays = _obstacle(facts)
        if stays is None and not facts.is_pruned:  # of a pruned one goes what a prune that was killed has left
            if facts.name in newest:
                stays = "one of the newest"
            elif age is not None and facts.date is not None and now - read_date(facts.date) < age:
                stays = f"not older than {counted(age.days, 'day')}"
        objects = [] if stays else _objects(run.store)
        if facts.is_pruned and not objects:
            stays = "its results were pruned before"
        chosen.append(Candidate(run, facts, stays, objects))
    return chosen


def _obstacle(facts: RunFacts) -> str | None:
    """Why a run must stay whatever its date is; None if it may go."""
    if facts.driver is not None:
        return f"driver {facts.driver} works on it"
    if facts.state == "damaged":
        return "it is damaged"
    if facts.logical_date is None and facts.samples is not None:
        return "it is not a run of a recurring job: it has no logical date"
    return None if facts.is_success else "it is not finished"


def _objects(store: Store) -> list[Stat]:
    # The sums of a driver's session stay, a few hundred bytes each: they say what a run cost.
    return [stat for folder in FOLDERS for stat in store.list(folder) if not stat.name.endswith("-session.jsonl")]


def prune_run(candidate: Candidate, on_lost: Callable[[str], None]) -> None:
    """Delete the results of a run, under its lease; may be called again after it was killed. LeaseHeld if a driver has started.

    LeaseLost if this process was suspended over its lease: what is left may belong to a driver that has taken over.
    """
    store = candidate.run.store
    with hold_lease(store, on_lost) as lease:
        objects = _objects(store)  # again: it was looked at without the lease
        _prove(candidate, objects)
        for stat in objects:
            failpoint("prune.before_delete")
            lease.check()
            store.delete(stat.name)
    store.remove_empty_folders()


def _prove(candidate: Candidate, objects: Sequence[Stat]) -> None:
    """Keep the ids that are ok, then say that the results are gone."""
    store = candidate.run.store
    if store.exists(PRUNED):
        return
    with suppress(AlreadyExists):
        store.create(IDS, write_parquet(ok_ids(store), {}))
    failpoint("prune.before_mark")
    facts = {
        "pruned_at": format_date(datetime.now(UTC)),
        "objects": len(objects),
        "bytes": sum(stat.size for stat in objects),
        "samples": candidate.facts.samples,
        "failed": count_failed(passes_of(store)),
    }
    with suppress(AlreadyExists):
        store.create(PRUNED, (json.dumps(facts) + "\n").encode())


def prune(base: Place, keep: Sequence[int | timedelta], *, yes: bool = False) -> int:
    """Show, and with `yes` delete, what goes; returns the exit code. A run that a driver has taken meanwhile stays.

    UserError if no recurring job has used `base` as its base path.
    """
    store, stop = open_store(base), StopFlag()
    if store.exists(PLAN):
        raise UserError(
            f"{store.url} is a run directory; allowed: the base path of a recurring job, the folder above the dates"
        )
    if not store.exists(LEASE):
        raise UserError(
            f"{store.url} is not the base path of a recurring job: there is no {LEASE}; allowed: the folder before the date in "
            "output.path"
        )
    with base_lease(store, stop.set) if yes else nullcontext():
        runs, verb = candidates(store, keep, datetime.now(UTC)), "pruned" if yes else "would be pruned"
        rows = []
        for one in runs:
            what = f"{counted(len(one.objects), 'file')}, {size_text(sum(stat.size for stat in one.objects))}"
            rows.append([one.facts.name, f"{verb}: {what}" if one.stays is None else f"stays: {one.stays}"])
        print("\n".join([f"{store.url}: {counted(len(runs), 'run')}", *table_lines(rows)]), flush=True)
        if not yes:
            print("nothing was deleted; --yes deletes it, and keeps what proves that the inputs are done")
            return OK
        for candidate in (one for one in runs if one.stays is None):
            if stop.reason is not None:
                _log.warning(f"{stop.reason}; run it again to continue")
                return INTERRUPTED
            try:
                prune_run(candidate, stop.set)
            except LeaseHeld as error:
                _log.warning(f"{candidate.facts.name} stays: {error}")
    return OK
