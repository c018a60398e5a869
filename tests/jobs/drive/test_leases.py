"""The run directory's lease while a driver works, on a clock that the test moves."""

import secrets

import pytest

from draftmill.jobs.drive.leases import give_back, hold_lease, keep_once
from draftmill.storage.errors import StoreError, StoreRefused, UserError
from draftmill.storage.runs.lease import LEASE, LeaseHeld, LeaseLost, acquire
from draftmill.storage.stores.store import MemoryStore, Stat


class Unreachable(MemoryStore):
    """A store that can't be written while it is `down` with an error."""

    down: StoreError | None = None

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        if self.down is not None:
            raise self.down
        return super().replace(name, data, etag=etag)


@pytest.fixture
def store() -> Unreachable:
    return Unreachable(secrets.token_hex(8))


@pytest.mark.parametrize("down", [StoreError("no answer"), StoreRefused("no permission")])
def test_a_store_that_does_not_answer_or_refuses_is_borne_until_the_lease_runs_out(store, down):
    now, lost = [1000.0], list[str]()
    lease = acquire(store, "first", 60, lambda: now[0])
    store.down = down
    now[0] += 59
    assert keep_once(lease, lost.append) and not lost
    store.down = None
    assert keep_once(lease, lost.append) and lease.expires_at_s == 1119
    store.down = down
    now[0] += 60
    assert not keep_once(lease, lost.append)
    assert lost == [f"the lease could not be renewed: {down}"]
    give_back(lease)  # says nothing


def test_a_driver_that_wakes_up_hears_that_its_lease_was_taken_over_and_gives_nothing_back(store):
    now, lost = [1000.0], list[str]()
    first = acquire(store, "first", 60, lambda: now[0])
    now[0] += 61
    second = acquire(store, "second", 60, lambda: now[0])
    assert not keep_once(first, lost.append) and "taken over" in lost[0]
    give_back(first)
    second.check()
    with pytest.raises(LeaseLost):
        first.check()


def test_a_kept_lease_is_held_inside_and_free_afterwards(store):
    with hold_lease(store, lambda reason: None) as lease:
        with pytest.raises(LeaseHeld, match=lease.owner):
            acquire(store, "another", 60)
        lease.check()
    with hold_lease(store, lambda reason: None) as again:
        assert again.epoch == lease.epoch + 1


@pytest.mark.parametrize("before", [[], ["first"]])
@pytest.mark.parametrize("written", [[], ["plan"]])
def test_a_driver_that_is_refused_before_it_wrote_anything_leaves_what_it_found(store, before, written):
    for owner in before:
        acquire(store, owner, 60).release()
    with pytest.raises(UserError), hold_lease(store, lambda reason: None):
        for name in written:
            store.create(name, b"")
        raise UserError("an id occurs twice")
    assert [stat.name for stat in store.list()] == ([LEASE] if before or written else []) + written
    assert acquire(store, "next", 60).epoch == len(before) + bool(before or written) + 1


@pytest.mark.parametrize("written", [[], ["plan"]])
def test_a_refusal_is_the_users_only_while_nothing_is_written(store, written):
    with pytest.raises(StoreError) as raised, hold_lease(store, lambda reason: None):
        for name in written:
            store.create(name, b"")
        raise StoreRefused("no permission")
    assert isinstance(raised.value, StoreRefused) == (not written)
    assert [stat.name for stat in store.list()] == ([LEASE, *written] if written else [])


def test_a_refusal_below_the_lease_of_a_name_stays_one(store):
    store.create("2026-11-22/_plan.json", b"")
    with pytest.raises(StoreRefused), hold_lease(store, lambda reason: None, covers=False):
        raise StoreRefused("no permission")
