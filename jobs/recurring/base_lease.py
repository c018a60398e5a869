"""The lease on a job's name: of the drivers of one base path, one works; another one leaves, waits or fails (`--if-running`).

    BASE/_lease.json               one driver of the whole recurring job
    BASE/2026-11-22/_lease.json    one driver of this run, whoever started it

A job without a date in its output path has only the lease of its run directory, and `--if-running` then means that one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

from draftmill.jobs.driving.lease_keeper import TTL_S, kept_lease
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.storage.errors import UserError
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost, holder, pid_here
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import Store

IfRunning = Literal["skip", "wait", "fail"]

POLL_S = 2.0
"""Seconds between two looks at a lease that somebody else holds."""


class Held(Exception):
    """Another driver holds the lease in `store`; `held` says who."""

    def __init__(self, store: Store, held: LeaseHeld, *, what: str) -> None:
        super().__init__(store, held, what)
        self.store, self.held, self.what = store, held, what

    def __str__(self) -> str:
        return f"another driver holds {self.what}: {self.held.who}"


@contextmanager
def run_lease(store: Store, on_lost: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease of a run directory during the block; raises Held at once if another driver has it."""
    with ExitStack() as stack:
        yield _entered(stack, kept_lease(store, on_lost), store, what="this run directory")


@contextmanager
def base_lease(store: Store, on_lost: Callable[[str], None]) -> Iterator[Lease]:
    """Hold the lease of a job's base path during the block; raises Held at once if another driver has it."""
    if store.exists(PLAN):
        raise UserError(
            f"{store.url} is a run directory, so it can't hold the runs of other dates", field="output.path"
        )
    with ExitStack() as stack:
        yield _entered(stack, kept_lease(store, on_lost, covers=False), store, what=f"the job {store.url}")


def _entered(stack: ExitStack, kept: AbstractContextManager[Lease], store: Store, *, what: str) -> Lease:
    try:
        return stack.enter_context(kept)
    except LeaseHeld as error:
        raise Held(store, error, what=what) from None


def wait_until_free(
    work: Callable[[], int], if_running: IfRunning, *, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Do the work, and return its exit code; if another driver holds a lease that it needs, do what `if_running` says.

    `skip` says so in one line and returns 0, if the other driver works (see `works`). `wait` starts the work again once the lease
    is free. `fail` returns 4.
    """
    said = None
    while True:
        try:
            return work()
        except LeaseLost as error:
            print(f"draftmill: {error}", file=sys.stderr)
            return INTERRUPTED
        except Held as error:
            if if_running == "skip" and works(error, sleep):
                print(f"draftmill: skipped: {error}")
                return OK
            if if_running == "skip":
                continue
            if if_running == "fail":
                print(f"draftmill: {error}", file=sys.stderr)
                return INTERRUPTED
            if said != error.held.owner:
                said = error.held.owner
                print(f"draftmill: waiting: {error}", file=sys.stderr)
            while holder(error.store) is not None:
                sleep(POLL_S)


def works(error: Held, sleep: Callable[[float], None]) -> bool:
    """Whether the holder of a lease works; False once the lease is free.

    A scheduler starts a driver again when its machine was lost, sooner than the lease of the lost one runs out. To leave then
    would end the job with exit code 0 and its work undone. So the holder has to be a living process of this machine, or to renew
    its lease before it runs out, which a driver that works does within a quarter of that time.
    """
    held = error.held
    if pid_here(held.owner) is not None or held.expires_at_s - time.time() > TTL_S:
        return True
    print(f"draftmill: {error}; waiting for a sign of life", file=sys.stderr)
    while (now := holder(error.store)) is not None:
        if (now.owner, now.expires_at_s) != (held.owner, held.expires_at_s):
            return True
        sleep(POLL_S)
    return False
