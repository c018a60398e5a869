"""The simulated cluster of benchmarks/cluster.py, small: the last units go to the workers that end them in time."""

from collections import deque

import numpy as np
import pytest

from benchmarks.cluster import LOAD_S, Machine, lower_bound, simulate


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_fifty_unequal_and_failing_workers_end_at_about_the_same_time(seed):
    found = simulate(50, 100_000, 64, seed)
    assert found["committed"] == list(range(found["units"])), "every unit once"
    assert 1.0 <= found["makespan_s"] / found["bound_s"] <= 1.03


def test_the_lower_bound_is_what_the_machines_can_do_at_best():
    steady = [Machine(speed, 0.0, deque(), np.inf, np.inf) for speed in (100.0, 300.0)]
    assert lower_bound(steady, 4000) == pytest.approx(LOAD_S + 10)
    late = Machine(100.0, 5.0, deque(), np.inf, np.inf)
    assert lower_bound([steady[1], late], 4000) == pytest.approx(LOAD_S + 5 + (4000 - 1500) / 400)
    failing = Machine(100.0, 0.0, deque([LOAD_S + 10]), np.inf, np.inf)  # it is up again 60 s later
    assert lower_bound([failing], 1500) == pytest.approx(LOAD_S + 10 + LOAD_S + 5)
    leaving = Machine(300.0, 0.0, deque(), np.inf, LOAD_S + 2)
    assert lower_bound([steady[0], leaving], 1600) == pytest.approx(LOAD_S + 10)
