"""One driver at a time, on a clock that the test moves."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from draftmill.storage.errors import DamagedRun
from draftmill.storage.runs.lease import (
    LEASE,
    Lease,
    LeaseHeld,
    LeaseLost,
    acquire,
    holder,
    process_is_dead,
    this_process,
)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_held_lease_is_refused_with_who_holds_it(store):
    clock = Clock()
    acquire(store, "first", 30, clock)
    with pytest.raises(LeaseHeld, match="first") as refused:
        acquire(store, "second", 30, clock)
    assert (refused.value.owner, refused.value.expires_at_s) == ("first", 1030.0)


def test_renewing_keeps_it_and_expiry_gives_it_away_with_a_higher_epoch(store):
    clock = Clock()
    first = acquire(store, "first", 30, clock)
    clock.now += 29
    first.renew()
    clock.now += 29
    with pytest.raises(LeaseHeld):
        acquire(store, "second", 30, clock)
    clock.now += 1
    second = acquire(store, "second", 30, clock)
    assert (first.epoch, second.epoch) == (1, 2)
    for use in (first.renew, first.check):
        with pytest.raises(LeaseLost):
            use()
    second.check()


def test_a_released_lease_is_free_at_once(store):
    clock = Clock()
    acquire(store, "first", 30, clock).release()
    assert acquire(store, "second", 30, clock).epoch == 2


def test_a_renewal_that_comes_after_the_release_is_refused(store):
    lease = acquire(store, "first", 30, Clock())
    lease.release()
    with pytest.raises(LeaseLost):
        lease.renew()
    assert holder(store, Clock()) is None


def test_releasing_a_lost_lease_harms_nobody(store):
    clock = Clock()
    first = acquire(store, "first", 30, clock)
    clock.now += 31
    second = acquire(store, "second", 30, clock)
    first.release()
    second.check()


def test_a_paused_driver_renews_a_lease_that_is_still_its_own(store):
    clock = Clock()
    lease = acquire(store, "first", 30, clock)
    clock.now += 3600
    lease.check()
    assert lease.expires_at_s == clock.now + 30
    with pytest.raises(LeaseHeld):
        acquire(store, "second", 30, clock)


def test_a_renewal_that_raised_and_was_written_is_one(store):
    lease = acquire(store, "first", 30)
    stat = store.stat(LEASE)
    assert stat is not None
    store.replace(LEASE, store.get(LEASE), etag=stat.etag)  # as a write of its own, whose answer was lost, leaves it
    lease.renew()
    lease.check()


def test_of_many_drivers_one_gets_the_expired_lease(store):
    clock = Clock()
    acquire(store, "old", 30, clock)
    clock.now += 31

    def attempt(index: int) -> Lease | None:
        try:
            return acquire(store, f"driver {index}", 30, clock)
        except LeaseHeld:
            return None

    with ThreadPoolExecutor(8) as pool:
        held = [lease for lease in pool.map(attempt, range(8)) if lease]
    assert [lease.epoch for lease in held] == [2]


def test_the_lease_of_a_dead_process_of_this_machine_is_free(store):
    code = "from draftmill.storage.runs.lease import this_process; print(this_process())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    owner = ended.stdout.strip()
    assert process_is_dead(owner) and not process_is_dead(this_process())
    clock = Clock()
    acquire(store, owner, 30, clock)
    assert acquire(store, this_process(), 30, clock).epoch == 2


@pytest.mark.parametrize("owner", ["somebody", "other-host:1234-5:99999999", "", "a:b:c", "::"])
def test_an_owner_elsewhere_is_never_taken_for_dead(owner):
    assert not process_is_dead(owner)


LEASE_TEXT = '{"owner": "a:b:1", "epoch": 3, "expires_at_s": 5.0}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "3", "[]", "{}", '"text"', "[" * 100_000, "\xff\xfe", "\0"),
        *(LEASE_TEXT.replace("5.0", value) for value in ("NaN", "Infinity", "1e300", "-1", '"5"', "null", "[]", "{}")),
        *(LEASE_TEXT.replace("3", value) for value in ("1.5", "-1", "0", "1" * 400, "true", "null", '"3"')),
        *(LEASE_TEXT.replace('"a:b:1"', value) for value in ("null", "1", "[]", "{}", "[" * 900 + "]" * 900)),
        LEASE_TEXT.replace("epoch", "epoc"),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_lease_is_named_with_a_remedy(store, text):
    store.put(LEASE, text.encode("latin-1"))
    for use in (lambda: acquire(store, "first", 30), lambda: holder(store)):
        with pytest.raises(DamagedRun, match=r"_lease\.json is damaged: .*; if no job runs here, delete it"):
            use()


@pytest.mark.s3
def test_a_renewal_whose_answer_was_lost_is_a_renewal(s3_store, s3_server):
    lease = acquire(s3_store, "first", 30)
    s3_server.fail("lost", part=LEASE)
    lease.renew()
    lease.renew()
