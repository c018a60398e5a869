"""`draftmill list`: the runs below a folder with their state, date and samples, one line each, or as JSON. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted, table_lines
from draftmill.jobs.recurring.runs import FoundRun, RunFacts, facts_of, runs_below
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import S3Options, Store, level_of
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import open_store


def list_runs(folder: str, *, as_json: bool = False, s3: S3Options | None = None) -> int:
    """Print the runs below a folder; returns the exit code. UserError if nothing is there."""
    store = open_store(folder, s3=s3)
    found = [
        promise.result() for _, promise in parallel_map(store, found_in(store, s3), lambda run: facts_of(run, s3=s3))
    ]
    if as_json:
        print(json.dumps([asdict(facts) for facts in found], indent=1))
    else:
        print("\n".join([f"{store.url}: {counted(len(found), 'run')}", *lines_of(found)]))
    return OK


def found_in(store: Store, s3: S3Options | None) -> list[FoundRun]:
    """The runs below a folder; UserError if nothing at all is there."""
    runs = runs_below(store, s3=s3)
    if not runs:
        level = level_of(store)
        if not level.folders and not level.files:
            raise UserError(f"nothing is at {store.url}")
    return runs


def lines_of(found: Sequence[RunFacts]) -> list[str]:
    """A line for each run."""
    return table_lines([[facts.name, facts.state, _date(facts), *_sums(facts)] for facts in found])


def _date(facts: RunFacts) -> str:
    if facts.date is None:
        return "-"
    return facts.date.removesuffix("T00:00:00Z").replace("T", " ").replace("Z", " UTC")


def _sums(facts: RunFacts) -> tuple[str, str]:
    """The samples, and what else there is to say."""
    if facts.state == "damaged":
        return "", f"`draftmill status {facts.run}` says what is damaged"
    if facts.samples is None:
        return "", "being planned" + (f", driver {facts.driver}" if facts.driver else "")
    samples = counted(facts.samples, "sample")
    if facts.failed is not None:
        return samples, f"{facts.failed:,} failed" + ("; results were pruned" if facts.is_pruned else "")
    units = f"{facts.units_done:,} of {facts.units:,} units done"
    return samples, units + (f", driver {facts.driver}" if facts.driver else "")
