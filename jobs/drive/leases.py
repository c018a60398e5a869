"""Holds a lease while a driver works, and does what `--if-running` says where another driver has it.

    BASE/_lease.json               held by the one driver that works on the recurring job
    BASE/2026-11-22/_lease.json    held by the one driver that works on this run

A job without a date in its output path has only the lease of its run directory. A thread of its own renews a lease, however long
planning or a store's answer takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal

from draftmill.jobs.drive.log import print_result
from draftmill.storage.errors import StoreError, StoreRefused, UserError
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost, acquire, holder, pid_here, take_away, this_process
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.store import Store

_log = logging.getLogger(__name__)

IfRunning = Literal["skip", "wait", "fail"]

TTL_S = 60.0
RENEWALS_PER_TTL = 4

POLL_S = 2.0
"""Seconds between two looks at a lease that another driver holds."""


@contextmanager
def hold_lease(
    store: Store, on_lost: Callable[[str], None], *, what: str = "this run directory", covers: bool = True
) -> Iterator[Lease]:
    """Hold the lease of `what` during the block; raises LeaseHeld at once if another driver has it.

    When the lease is lost and the driver must stop, the keeper's thread calls `on_lost` with a reason. A block that ends with
    a UserError or StoreRefused before it has written anything leaves the run directory as it was. Once it has written, a
    refusal is raised as a plain StoreError, after which a scheduler starts the command again. `covers` says whether what the
    block writes is in `store`.
    """
    try:
        lease = acquire(store, this_process(), TTL_S)
    except LeaseHeld as error:
        raise LeaseHeld(error.owner, error.expires_at_s, what, store) from None
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lease, done, on_lost), name="lease", daemon=True)
    keeper.start()
    leave = give_back
    try:
        yield lease
    except UserError:
        leave = _withdraw
        raise
    except StoreRefused as error:
        leave = _withdraw
        if covers and not _is_alone(lease):
            raise StoreError(f"{error}; run it again to continue") from error
        raise
    finally:
        done.set()
        keeper.join(timeout=TTL_S)
        leave(lease)


def base_lease(store: Store, on_lost: Callable[[str], None]) -> AbstractContextManager[Lease]:
    """Hold the lease of a recurring job's base path during a block, as `hold_lease`; UserError if it is a run directory."""
    if store.exists(PLAN):
        raise UserError(
            f"{store.url} is a run directory, so it can't hold the runs of other dates", field="output.path"
        )
    return hold_lease(store, on_lost, what=f"the job {store.url}", covers=False)


def _keep(lease: Lease, done: threading.Event, on_lost: Callable[[str], None]) -> None:
    while not done.wait(lease.ttl_s / RENEWALS_PER_TTL):
        if not keep_once(lease, on_lost):
            return


def keep_once(lease: Lease, on_lost: Callable[[str], None]) -> bool:
    """Renew the lease. If it is lost, call `on_lost` with the reason and return False. A store error alone doesn't lose it."""
    try:
        lease.renew()
    except LeaseLost as error:
        on_lost(str(error))
        return False
    except StoreError as error:
        if lease.clock() >= lease.expires_at_s:
            on_lost(f"the lease could not be renewed: {error}")
            return False
    return True


def _is_alone(lease: Lease) -> bool:
    """Whether the store is known to hold nothing but this lease, which nobody had before."""
    try:
        return lease.is_alone()
    except StoreError:
        return False


def give_back(lease: Lease) -> None:
    """Release the lease, if the store can be reached; else it expires by itself."""
    with suppress(StoreError):
        lease.release()


def _withdraw(lease: Lease) -> None:
    """Restore the run directory, if it holds nothing new but the lease and the store can be reached."""
    with suppress(StoreError):
        lease.withdraw()
        lease.store.tidy()


def gives_way(held: LeaseHeld, if_running: IfRunning, waited_for: str | None) -> bool:
    """Do what `if_running` says where another driver holds a lease; returns whether the work is left to that driver.

    `skip` says so in one line and leaves it, if that driver works. `wait` returns once the lease is free, for the work to start
    again. `fail` raises `held`. `waited_for` is the driver that the work has waited for before, of whom nothing is said again.

    A scheduler may start a lost driver again before the lease of the lost one expires. To give way then would end the job with
    exit code 0 and its work undone. So `skip` gives way only to a proven holder: a living process of this machine, or one that
    renews its lease while we watch, as a driver does RENEWALS_PER_TTL times. No driver holds a lease for longer than TTL_S: one
    that expires later has the date of a wrong clock. It is watched, too, and taken over if nobody renews it.
    """
    now, store = held, held.store
    assert store is not None
    if if_running == "fail":
        raise held
    is_odd = held.expires_at_s - time.time() > TTL_S
    is_proven = pid_here(held.owner) is not None and not is_odd
    if waited_for != held.owner and not (if_running == "skip" and is_proven):
        what = "waiting" if if_running == "wait" else "waiting for a sign of life"
        _log.warning(f"{what}: {held}")
    if if_running == "wait":
        while _is_renewed(now, store):
            now = holder(store) or now
            now.what = held.what
    elif is_proven or _is_renewed(held, store):
        print_result(f"draftmill: skipped: {held}")
        return True
    return False


def _is_renewed(held: LeaseHeld, store: Store) -> bool:
    """Watch a lease until it is renewed; False once it is free, and it is after TTL_S without a renewal."""
    watched_s = 0.0
    while (now := holder(store)) is not None:
        if (now.owner, now.expires_at_s) != (held.owner, held.expires_at_s):
            return True
        if watched_s > TTL_S:
            take_away(store, held)
            _log.warning(f"taken over: {held}; it was not renewed for {TTL_S:.0f} s")
        time.sleep(POLL_S)
        watched_s += POLL_S
    return False
