"""Renews the run directory's lease in a separate thread, however long planning or a store's answer takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from draftmill.storage.errors import StoreError, StoreRefused, UserError
from draftmill.storage.runs.lease import Lease, LeaseLost, acquire, this_process
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import tidy

TTL_S = 60.0
RENEWALS_PER_TTL = 4


@contextmanager
def kept_lease(
    store: Store, on_lost: Callable[[str], None], *, ttl_s: float = TTL_S, covers: bool = True
) -> Iterator[Lease]:
    """Hold the lease during the block; raises LeaseHeld at once if another driver has it.

    When the lease is lost and the driver must stop, the keeper's thread calls `on_lost` with a reason. A block that ends with
    a UserError or StoreRefused before it has written anything leaves the run directory as it was. Once it has written, a
    refusal is raised as a plain StoreError, after which a scheduler starts the command again. `covers` says whether what the
    block writes is in `store`.
    """
    lease = acquire(store, this_process(), ttl_s)
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(lease, done, on_lost), name="lease", daemon=True)
    keeper.start()
    leave = give_back
    try:
        yield lease
    except UserError:
        leave = withdraw
        raise
    except StoreRefused as error:
        leave = withdraw
        if covers and not is_alone(lease):
            raise StoreError(f"{error}; run it again to continue") from error
        raise
    finally:
        done.set()
        keeper.join(timeout=ttl_s)
        leave(lease)


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


def is_alone(lease: Lease) -> bool:
    """Whether the store is known to hold nothing but this lease, which nobody had before."""
    try:
        return lease.is_alone()
    except StoreError:
        return False


def give_back(lease: Lease) -> None:
    """Release the lease, if the store can be reached."""
    try:
        lease.release()
    except StoreError:
        return  # the lease expires by itself


def withdraw(lease: Lease) -> None:
    """Restore the run directory, if it holds nothing new but the lease and the store can be reached."""
    with suppress(StoreError):
        lease.withdraw()
        tidy(lease.store)
