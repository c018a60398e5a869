"""The lease that allows one driver per run directory: `_lease.json`, updated by conditional replacement.

A lease keeps two drivers from wasting each other's work; it does not make commits safe (conditional creation does),
so a driver that wakes up late can lose work but never damage any. Clocks of two drivers should agree to well under the ttl.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from draftmill.storage.errors import AnotherDriver, DamagedRun, StoreError, printable
from draftmill.storage.failpoints import failpoint
from draftmill.storage.json_text import parse_as
from draftmill.storage.stores.store import AlreadyExists, Conflict, NotFound, Stat, Store

LEASE = "_lease.json"

LATEST_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
TRIES = 4
"""Attempts to acquire a free lease that others take and give back meanwhile."""


class LeaseHeld(AnotherDriver):
    """Another driver holds the lease of `what`, in `store`: `owner`, until `expires_at_s` (Unix time) unless it renews."""

    def __init__(
        self, owner: str, expires_at_s: float, what: str = "this run directory", store: Store | None = None
    ) -> None:
        super().__init__(owner, expires_at_s, what, store)
        self.owner, self.expires_at_s, self.what, self.store = owner, expires_at_s, what, store

    def __str__(self) -> str:
        until = datetime.fromtimestamp(self.expires_at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"another driver holds {self.what}: {printable(self.owner)}, until {until} if it does not renew"


class LeaseLost(AnotherDriver):
    """This driver's lease was taken over; it must stop without writing more."""


@dataclass(slots=True)
class Lease:
    """A held lease. `epoch` grows by one with every holder; `expires_at_s` is Unix time on the holder's clock."""

    store: Store
    owner: str
    epoch: int
    expires_at_s: float
    ttl_s: float
    clock: Callable[[], float]
    etag: str
    is_over: bool = False

    def renew(self) -> None:
        """Afterwards the lease is ours for another `ttl_s`; LeaseLost if another driver has taken it."""
        failpoint("lease.before_renew")
        if self.is_over:  # a thread that was held up may come late
            raise self._lost()
        self._write(self.clock() + self.ttl_s)

    def release(self) -> None:
        """Afterwards any driver may take it at once. If it was lost already, that is no error."""
        self.is_over = True
        with suppress(LeaseLost):
            self._write(0.0)

    def withdraw(self) -> None:
        """Like `release`, but delete the lease file if nothing else was ever in the store."""
        if not self.is_alone():
            return self.release()
        with suppress(LeaseLost):
            self.check()
            self.store.delete(LEASE)

    def is_alone(self) -> bool:
        """Whether the store has never had anything but this lease."""
        return self.epoch == 1 and [stat.name for stat in islice(self.store.list(), 2)] == [LEASE]

    def check(self) -> None:
        """Return if the store's current lease is ours; else raise LeaseLost. One that has expired, and is ours, is renewed."""
        self.etag = self._own_etag()
        if self.clock() >= self.expires_at_s:
            self.renew()

    def _own_etag(self) -> str:
        content, stat = _read(self.store)
        if content is None or stat is None or (content.owner, content.epoch) != (self.owner, self.epoch):
            raise self._lost()
        return stat.etag

    def _lost(self) -> LeaseLost:
        return LeaseLost(f"the lease of {self.store.url} (epoch {self.epoch}) was taken over")

    def _write(self, expires_at_s: float) -> None:
        data = _Content(self.owner, self.epoch, expires_at_s).json()
        try:
            stat = self.store.replace(LEASE, data, etag=self.etag)
        except Conflict:  # of another driver, or of a write of our own whose answer was lost
            try:
                stat = self.store.replace(LEASE, data, etag=self._own_etag())
            except Conflict:
                raise self._lost() from None
        self.etag, self.expires_at_s = stat.etag, expires_at_s


@dataclass(frozen=True, slots=True)
class _Content:
    owner: str
    epoch: Annotated[int, Field(strict=True, gt=0, lt=2**53)]
    expires_at_s: Annotated[float, Field(strict=True, ge=0, le=LATEST_S)]

    def json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def acquire(store: Store, owner: str, ttl_s: float, clock: Callable[[], float] = time.time) -> Lease:
    """Of several drivers, one holds the lease: it returns, the others raise LeaseHeld(owner, expires_at_s).

    A lease that has expired, was released, or whose owner is a dead process of this machine is taken over with a
    higher epoch. Call `renew` well within `ttl_s` (seconds).
    """
    for _ in range(TRIES):
        before, stat = _read(store)
        if held := _holder(before, clock):
            raise held
        content = _Content(owner, before.epoch + 1 if before else 1, clock() + ttl_s)
        failpoint("lease.before_acquire")
        with suppress(AlreadyExists, Conflict):
            if stat is None:
                stat = store.create(LEASE, content.json())
            else:
                stat = store.replace(LEASE, content.json(), etag=stat.etag)
            return Lease(store, owner, content.epoch, content.expires_at_s, ttl_s, clock, stat.etag)
    raise LeaseHeld("unknown", clock())


def take_away(store: Store, held: LeaseHeld) -> None:
    """Let the lease expire if it is still as it was in `held`."""
    content, stat = _read(store)
    if stat and content and content == _Content(held.owner, content.epoch, held.expires_at_s):
        with suppress(Conflict):
            store.replace(LEASE, replace(content, expires_at_s=0.0).json(), etag=stat.etag)


def holder(store: Store, clock: Callable[[], float] = time.time) -> LeaseHeld | None:
    """Who holds the store's lease now, as the error that `acquire` would raise; None if it is free."""
    return _holder(_read(store)[0], clock)


def driver_of(store: Store) -> str | None:
    """The driver that works on a run now; None if there is none, or if the lease can't be read."""
    try:
        held = holder(store)
    except StoreError:
        return None
    return None if held is None else held.owner


def _holder(content: _Content | None, clock: Callable[[], float]) -> LeaseHeld | None:
    if content is None or clock() >= content.expires_at_s or process_is_dead(content.owner):
        return None
    return LeaseHeld(content.owner, content.expires_at_s)


def this_process() -> str:
    """Name this process so that others on the same machine can see whether it lives: `host:machine:pid`."""
    return f"{socket.gethostname()}:{_machine()}:{os.getpid()}"


def process_is_dead(owner: str) -> bool:
    """True only if `owner` names a process of this machine and that process is certainly gone."""
    pid = pid_here(owner)
    if pid is None:
        return False
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def pid_here(owner: str) -> int | None:
    """The process id of an owner if it is on this machine, else None."""
    host, _, rest = owner.partition(":")
    machine, _, pid = rest.partition(":")
    is_here = (host, machine) == (socket.gethostname(), _machine()) and pid.isdecimal()
    return int(pid) if is_here else None


def _machine() -> str:
    """Differs between boots and between containers, whose process numbers mean different processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return "-"


def _read(store: Store) -> tuple[_Content | None, Stat | None]:
    stat = store.stat(LEASE)
    if stat is None:
        return None, None
    try:
        return parse_as(_Content, store.get(LEASE)), stat
    except NotFound:  # deleted between the two reads
        return None, None
    except ValueError:
        raise DamagedRun(f"{store.url}/{LEASE}", "it is not a lease", "if no job runs here, delete it") from None
