"""Writes the manifest of a finished run, and deletes the files of duplicate attempts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from draftmill.storage.runs.commit import read_record, read_unit, write_manifest
from draftmill.storage.runs.unit_facts import CommittedUnit, CommittedUnits
from draftmill.storage.stores.parallel import parallel_map

if TYPE_CHECKING:
    from draftmill.jobs.running.session import Run


SETTLE_S = 1.0
"""Wait before each last look for stray files, in a store that ignores conditional writes."""


def write_run_manifest(run: Run, committed: CommittedUnits, earlier: Iterable[str]) -> None:
    """Write the manifest: this session's units come from the receipts, earlier ones are read from the store."""
    units = committed.facts
    for _, facts in parallel_map(run.store, earlier, lambda name: committed_facts(run, name), reads=True):
        units.add(facts.result())
    if not run.conditional:
        _sweep(run, units)
    write_manifest(
        run.store,
        units,
        fingerprint=run.plan.fingerprint,
        units=run.plan.units,
        rows=run.plan.rows,
        lease=run.lease,
    )


def _sweep(run: Run, units: Iterable[CommittedUnit]) -> None:
    """Delete the files of duplicate attempts. The names that count are recorded, and all workers have ended.

    The last write of an ended worker may still be in progress in the store: repeat until no more files appear.
    """
    counting = {unit.object.removeprefix("data/") for unit in units}
    _delete_others(run, counting)
    time.sleep(SETTLE_S)
    while _delete_others(run, counting):
        time.sleep(SETTLE_S)


def _delete_others(run: Run, counting: set[str]) -> int:
    """Delete unit files and traces with other names; returns how many. A trace has the same name as its data file."""
    others = [
        stat.name
        for folder in ("data/", "traces/")
        for stat in run.store.list(folder)
        if stat.name.removeprefix(folder) not in counting
    ]
    for name in others:
        run.lease.check()  # without the lease delete nothing: the files may belong to our successor
        run.store.delete(name)
    return len(others)


def committed_facts(run: Run, name: str) -> CommittedUnit:
    """The facts of a unit that an earlier session committed, from its data file or its record."""
    if run.conditional:
        return read_unit(run.store, name, expected={"fingerprint": run.plan.fingerprint})
    return read_record(run.store, name)
