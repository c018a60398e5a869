"""The invariants of the scheduler's records."""

from itertools import pairwise

from draftmill.actors.messages import MOST_UNITS
from draftmill.jobs.schedule.unit_leases import COPIES, Bisection, SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Assert that the records agree with each other."""
    waiting = list(state.waiting)
    assert len(waiting) == len(set(waiting)), "a unit waits twice"
    resting = {number for number, unit in state.touched.items() if unit.resting_until_s is not None}
    held = {lease.unit for lease in state.leases.values()}
    places = [set(waiting), state.delicate, resting, held, state.done]
    assert set().union(*places) == set(state.sizes), "a unit is lost"
    for number in state.sizes:
        homes = [number in place for place in places]
        probed = number in state.touched and state.touched[number].bisection is not None
        assert sum(homes) == 1 or (probed and not homes[0] and not homes[4]), f"unit {number} is in two places"
    _check_leases(state)


def _check_leases(state: SchedulerState) -> None:
    for number, lease in state.leases.items():
        assert number in state.workers[lease.worker].leases and number in state.touched[lease.unit].leases
        assert lease.rows is None or lease.rows in (state.touched[lease.unit].bisection or Bisection()).asked
    for worker in state.workers.values():
        assert worker.up or not worker.leases
        assert len(worker.leases) <= (1 if state.holds_alone(worker) else MOST_UNITS)
        assert worker.spent <= set(worker.leases)
        assert all(state.leases[number].worker == worker.name for number in worker.leases)
    for unit in state.touched.values():
        assert all(number in state.leases for number in unit.leases)
        assert unit.bisection is not None or len(unit.leases) <= (1 if unit.alone else COPIES)
        if unit.bisection is not None:
            ranges = sorted(unit.bisection.waiting + unit.bisection.asked)
            assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "probes overlap"
