"""Thousands of jobs in a simulated world (tests/simulation): whatever goes wrong, every row is there once, with a reason.

The driver, the scheduler, the lease and the committer are the real ones. `make soak` plays ten times as many schedules.
"""

import itertools
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest

from draftmill.jobs.schedule.unit_leases import SchedulerState, Unit
from tests.simulation.disk import Broken, Handle, Job, check_promise
from tests.simulation.schedules import drawn_job, play, simulated
from tests.simulation.world import Fault, Kind, SimThread, World

pytestmark = pytest.mark.timeout(600)

FEW, SCHEDULES = 150, 2500
"""Drawn ones in `make test` and in `make test-all`; the numbered ones come on top."""
MORE = [pytest.param(range(n * SCHEDULES, (n + 1) * SCHEDULES), marks=pytest.mark.soak) for n in range(1, 10)]

JOBS = 6
"""Jobs of which every access of the store goes wrong once in every way: about 120 and 200 schedules each."""

FATES = ("crash before", "crash after", "refused", "denied", "lost", "pause before", "pause after")


@pytest.fixture(scope="module")
def at_work():
    with simulated() as at_work:
        yield at_work


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, SCHEDULES), marks=pytest.mark.slow), *MORE], ids=str
)
def test_whatever_happens_when_every_row_is_there_once_with_a_reason(at_work, seeds):
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = play(World(drawn_job(seed), seed, faults=seed % 7), at_work)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(what.partition(": ")[2].split(" data")[0] or what.partition(" ")[2] for what in world.struck)
        seen["sessions"] += world.drivers
    assert seen["sessions"] > 2 * len(seeds)
    for what in (*FATES[:4], "pause", "dies", "falls silent", "clock jumps", "stop", "raises"):
        assert any(what in key for key in seen), f"no schedule had: {what}"


@pytest.mark.slow
def test_one_fault_at_any_access_of_the_store_loses_nothing(at_work):
    for seed in range(JOBS):
        job = drawn_job(seed)
        accesses = play(World(job, seed), at_work).accesses
        for at, fate in itertools.product(range(1, accesses + 1), FATES):
            try:
                world = play(World(job, seed, fault=Fault(at, fate)), at_work)
            except Exception as error:
                raise AssertionError(f"{fate} at access {at}, {seed=}: {error}") from error
            assert len(world.struck) == 1


def undisturbed(at_work: dict, seed: int, slow: Kind | None = None) -> World:
    """A world without faults, of which one session does all the work."""
    world = at_work["world"] = World(Job([2] * 30, {(7, 1): "raise"}, workers=2, attempts=2), seed, slow=slow)
    assert world.session() == "done" and world.session() == "finished"
    check_promise(world.disk, disturbed=False)
    return world


def test_with_slow_answers_of_any_kind_a_run_ends_like_one_without(at_work):
    plain = undisturbed(at_work, 1)
    took_s = {kind: undisturbed(at_work, 1, kind).now_s - plain.now_s for kind in plain.kinds}
    assert took_s.keys() >= {(True, "list", "data"), (True, "put", "attempts"), (True, "replace", "_lease.json")}
    assert 400 < took_s.pop((False, "create", "data")) < 1500, "30 units of two workers"
    assert all(20 < seconds < 200 for seconds in took_s.values()), f"a driver waits again and again: {took_s}"


def test_a_log_on_the_drivers_own_thread_is_found(at_work):
    start = SimThread.start

    def waited_for(self: SimThread) -> None:
        start(self)
        self.join(1e9)

    with patch.object(SimThread, "start", waited_for):
        assert undisturbed(at_work, 1, (True, "put", "attempts")).now_s > 2000


def broken_within(at_work: dict, schedules: int) -> str:
    """The first broken promise among so many schedules."""
    for seed in range(schedules):
        try:
            play(World(drawn_job(seed), seed, faults=seed % 7), at_work)
        except Broken as promise:
            return str(promise)
    return ""


def test_a_committer_that_writes_over_what_is_there_is_found(at_work):
    create = Handle._create

    def careless(self: Handle, name: str, data: bytes, metadata: dict[str, str] | None):
        return (self._write if name.startswith("data/") else partial(create, self))(name, data, metadata)

    with patch.object(Handle, "_create", careless):
        assert "was written twice" in broken_within(at_work, 300)


@pytest.mark.parametrize(
    ("kept", "schedules"),
    [(lambda worker, held: held[:1], 300), (lambda worker, held: [] if worker.leaving else held, 2000)],
    ids=["what else a dead worker held", "what was on a drained node"],
)
def test_a_scheduler_that_forgets_units_is_found(at_work, kept, schedules):
    dismiss = SchedulerState.dismiss

    def forgetful(self: SchedulerState, name: str):
        known = dismiss(self, name)
        return known and (known[0], kept(*known))

    with patch.object(SchedulerState, "dismiss", forgetful):
        assert broken_within(at_work, schedules) == "the job does not end"


@pytest.mark.slow
def test_copies_of_a_unit_that_fails_are_found(at_work):
    """A mistake that was made: while one copy ran, the failures of the other settled nothing, for ever."""
    with patch.object(Unit, "suspect", property(lambda self: self.alone)):
        assert broken_within(at_work, 300) == "the job does not end"
