"""How long a packing takes if costs are known: refilled slots, static batches, and the bound below which nothing is possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def refill_makespan(costs: Sequence[float], slots: int) -> float:
    """Time until all samples are done, if each of `slots` takes the next sample as soon as it is free."""
    free = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def static_makespan(costs: Sequence[float], slots: int) -> float:
    """The same, if a batch of `slots` samples must end before the next begins."""
    return float(sum(max(costs[at : at + slots]) for at in range(0, len(costs), slots)))


def makespan_bound(costs: Sequence[float], slots: int) -> float:
    """A lower bound on any schedule: all work shared evenly, or the longest sample alone."""
    return max(sum(costs) / slots, max(costs, default=0.0))
