"""`draftmill prune`: deletes the results of old runs of a recurring job; without --yes it only says what it would delete."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.leases import base_lease
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.recurring.pruning import Candidate, Keep, candidates, prune_run
from draftmill.storage.errors import UserError
from draftmill.storage.runs.lease import LEASE, LeaseHeld
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import open_store


def prune(base: str, keep: Keep, *, yes: bool = False, unfinished: bool = False, s3: S3Options | None = None) -> int:
    """Show, and with `yes` delete, the runs that go; returns the exit code. UserError if `base` is no base path."""
    store = open_store(base, s3=s3)
    check_base(store)
    if not yes:
        found = candidates(store, keep, datetime.now(UTC), unfinished=unfinished, s3=s3)
        print("\n".join([*lines_of(store, keep, found), _dry(found)]))
        return OK
    stop = StopFlag()
    with base_lease(store, stop.set):
        found = candidates(store, keep, datetime.now(UTC), unfinished=unfinished, s3=s3)
        print("\n".join(lines_of(store, keep, found, verb="pruned")), flush=True)
        return delete(found, stop, s3)


def check_base(store: Store) -> None:
    """Raise UserError unless a recurring job has used this as its base path."""
    if store.exists(PLAN):
        raise UserError(
            f"{store.url} is a run directory; allowed: the base path of a recurring job, the folder above the dates"
        )
    if not store.exists(LEASE):
        raise UserError(
            f"{store.url} is not the base path of a recurring job: there is no {LEASE}; allowed: the folder before the date in "
            "output.path"
        )


def delete(found: Sequence[Candidate], stop: StopFlag, s3: S3Options | None) -> int:
    """Delete what goes; returns the exit code. A run that a driver has taken meanwhile stays."""
    for one in found:
        if one.stays is not None:
            continue
        if stop.reason is not None:
            print(f"draftmill: {stop.reason}; run it again to continue", file=sys.stderr)
            return INTERRUPTED
        try:
            prune_run(one, stop.set, s3=s3)
        except LeaseHeld as error:
            print(f"draftmill: {one.facts.name} stays: {error}", file=sys.stderr)
    return OK


def lines_of(store: Store, keep: Keep, found: Sequence[Candidate], *, verb: str = "would be pruned") -> list[str]:
    """A line for each run: why it stays, or what goes."""
    if not found:
        return [f"{store.url}: no runs"]
    width = max(len(one.facts.name) for one in found)
    head = f"{store.url}: {counted(len(found), 'run')}; to be kept: {keep.text}"
    return [head, *(f"  {one.facts.name:<{width}}  {_what(one, verb)}" for one in found)]


def _what(one: Candidate, verb: str) -> str:
    if one.stays is not None:
        return f"stays: {one.stays}"
    whole = "" if one.facts.is_success else "; it is not finished, and goes whole"
    return f"{verb}: {counted(len(one.objects), 'file')}, {size_text(one.num_bytes)}{whole}"


def _dry(found: Sequence[Candidate]) -> str:
    going = [one for one in found if one.stays is None]
    if not going:
        return "nothing to delete"
    files, size = sum(len(one.objects) for one in going), size_text(sum(one.num_bytes for one in going))
    return (
        f"nothing was deleted; --yes deletes {counted(files, 'file')}, {size}, of {counted(len(going), 'run')}, and keeps what "
        "proves that their inputs are done"
    )
