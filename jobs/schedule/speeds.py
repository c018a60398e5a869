"""Who should take which of the last units, by the workers' measured speeds, so that all workers end at about the same time.

A worker's *share* is its part of all remaining tokens, in proportion to its speed. It takes the longest unit that fits into most
of its share next to what it still has to do: fast workers take the long units, slow ones the short ones. If none fits, it takes
the shortest one, unless another worker would finish that one sooner. Only ratios of speeds matter. Pure: numbers in, numbers out.

Uniform machines: Graham's longest-processing-time rule by finishing times (Gonzalez, Ibarra, Sahni 1977).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from draftmill.jobs.schedule.unit_leases import SchedulerState, Worker
from draftmill.jobs.schedule.units import Waiting

EARLY_PART: Final = 0.8
LATE_PART: Final = 0.9
"""The part of its share that a worker fills with long units, while all remaining tokens wait, and when no token waits any more.

Shares shrink when workers join or a unit comes back, less so near the end; a worker that has taken too long a unit ends last.
"""

SLOWEST: Final = 10
"""A worker of unknown speed gets long units as the fastest of the slowest 1/SLOWEST of the workers does."""

SILENT_S: Final = 20.0
"""Seconds without a token after which a worker's units are copied first, if workers are idle; it is killed much later."""


class Outlook:
    """What is known while units are given away: all remaining tokens, those that wait, and each worker's load and speed."""

    __slots__ = ("_barred", "_first", "_guesses", "loads", "remaining", "speed", "speeds", "waiting")

    def __init__(
        self,
        waiting: float,
        loads: dict[str, float],
        speeds: dict[str, float],
        *,
        guesses: dict[str, float] | None = None,
        barred: Iterable[str] = (),
    ) -> None:
        """`guesses` are the speeds for which workers of unknown speed get long units; `barred` workers can't be the first."""
        self.waiting, self.loads, self.speeds = waiting, loads, speeds
        self._guesses = guesses or {}
        self.remaining = waiting + sum(loads.values())
        self.speed = sum(speeds.values())
        self._barred = frozenset(barred)
        self._first: dict[int, float] = {}

    def give(self, name: str, tokens: int) -> None:
        """A waiting unit of so many tokens goes to a worker."""
        self.waiting -= tokens
        self.loads[name] += tokens
        self._first.clear()

    def fitting(self, name: str) -> float:
        """The tokens of the longest unit that fits into most of the worker's share next to what it still has to decode."""
        part = LATE_PART - (LATE_PART - EARLY_PART) * self.waiting / self.remaining if self.remaining > 0 else LATE_PART
        return part * self.remaining * self._guesses.get(name, self.speeds[name]) / self.speed - self.loads[name]

    def is_first(self, name: str, tokens: int) -> bool:
        """Whether no other worker that may take units would finish one of so many tokens sooner."""
        if tokens not in self._first:
            free = (other for other in self.loads if other not in self._barred)
            self._first[tokens] = min((self.finish_s(other, tokens) for other in free), default=0.0)
        return self.finish_s(name, tokens) <= self._first[tokens]

    def finish_s(self, name: str, tokens: float) -> float:
        """When a worker would finish a unit that it gets now; in units of tokens per speed."""
        return (self.loads[name] + tokens) / self.speeds[name]


def fitting_unit(waiting: Waiting, view: Outlook, name: str) -> int | None:
    """Remove and return the unit that a worker should take; None if other workers should take those that wait.

    It is the next one of all as long as that fits. Else it is one of the last windows, or the next one if they are empty.
    """
    fits = view.fitting(name)
    if not waiting.is_last and waiting.next_tokens() <= fits:
        return waiting.take()
    number = waiting.take_fitting(fits)
    if number is not None:
        return number
    shortest = waiting.shortest()
    if shortest is not None:
        return waiting.take_fitting(shortest) if view.is_first(name, shortest) else None
    return waiting.take() if view.is_first(name, waiting.next_tokens()) else None


def outlook(state: SchedulerState, workers: Iterable[Worker], now_s: float) -> Outlook | None:
    """The outlook for these workers; None as long as no speed is known.

    A worker without a known speed counts as an average one, but gets long units only as one of the slowest would. The first to
    finish a waiting unit is not a worker whose unit runs alone, or that has generated nothing for SILENT_S.
    """
    workers = list(workers)
    speeds = {worker.name: worker.speed for worker in workers}
    known = sorted(speed for speed in speeds.values() if speed > 0)
    if not known:
        return None
    usual, low = sum(known) / len(known), known[len(known) // SLOWEST]
    scale = state.scale
    return Outlook(
        state.waiting.tokens,
        {worker.name: state.left(worker, scale) for worker in workers},
        {name: speed or usual for name, speed in speeds.items()},
        guesses={name: low for name, speed in speeds.items() if not speed},
        barred=[worker.name for worker in workers if is_silent(worker, now_s) or state.holds_alone(worker)],
    )


def is_silent(worker: Worker, now_s: float) -> bool:
    """Whether a worker holds units and has generated nothing for SILENT_S: it may hang."""
    return bool(worker.leases) and now_s - worker.moved_s > SILENT_S
