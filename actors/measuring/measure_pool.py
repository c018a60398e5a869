"""Ray actors that measure units: each has one unit at a time; a lost actor's unit goes to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from draftmill.actors.job import WorkerResources
from draftmill.actors.measuring.measure import MeasureJob, MeasureWorker, UnitMeasured, UnitToMeasure
from draftmill.actors.ray.pool import actor_class, end_workers, reason_of
from draftmill.storage.errors import StoreError, UserError

MOST_TRIES = 3
"""How often a unit may end its worker or fail before it is given up."""

MOST_LOST = 8
"""How many workers in a row may be lost without any unit done in between."""


@dataclass(slots=True, eq=False)
class _Member:
    actor: Any
    call: Any
    unit: UnitToMeasure | None = None
    is_up: bool = False


@dataclass(slots=True)
class MeasurePool:
    """Measures all units with `count` actors; `poll` moves it on. `early` are spare actors with the same resources."""

    job: MeasureJob
    resources: WorkerResources
    count: int
    units: Iterable[UnitToMeasure]
    early: list[Any] = field(default_factory=list)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)
    _waiting: deque[UnitToMeasure] = field(default_factory=deque)
    _members: list[_Member] = field(default_factory=list)
    _tries: dict[tuple[int, int], int] = field(default_factory=dict)
    _lost: int = 0
    _job: Any = None
    _stopped: bool = False

    def start(self) -> None:
        """Ask Ray for the workers."""
        self._waiting = deque(self.units)
        self._job = ray.put(self.job)
        wanted = min(self.count, len(self._waiting))
        end_workers(self.early[wanted:])
        for actor in self.early[:wanted]:
            self._members.append(_Member(actor, actor.take.remote(self._job, self.resources.threads)))
        for _ in range(wanted - len(self._members)):
            self._add()

    def _add(self) -> None:
        actor = actor_class(MeasureWorker, self.resources).remote(self._job, self.resources.threads)
        self._members.append(_Member(actor, actor.where.remote()))

    @property
    def busy(self) -> bool:
        """Whether a unit is being measured, or waits and may start."""
        return any(member.unit is not None for member in self._members) or bool(self._waiting and not self._stopped)

    def stop(self) -> None:
        """Start no further unit."""
        self._stopped = True

    def poll(self, timeout_s: float) -> list[UnitMeasured]:
        """Wait for news, at most `timeout_s`; returns the units that were measured.

        Raises UserError if a worker can't start for a reason that the user can change, StoreError if workers are lost again and
        again.
        """
        for member in self._members:
            if member.is_up and member.call is None:  # a lost worker's unit may have come back
                self._give(member)
        calls = {member.call: member for member in self._members if member.call is not None}
        if not calls:
            return []
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return [found for call in ready if (found := self._answer(calls[call])) is not None]

    def _answer(self, member: _Member) -> UnitMeasured | None:
        unit, call = member.unit, member.call
        member.call = member.unit = None
        try:
            found = ray.get(call)
        except RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, UserError):
                raise UserError(cause.message, field=cause.field) from None
            if unit is None:  # a reused worker that could not take this job: out of memory, a judge that does not load
                self._members.remove(member)
                end_workers([member.actor])
                self._lose(None, error)
                return None
            self._again(unit, reason_of(error))
            self._give(member)
            return None
        except RayError as error:
            self._members.remove(member)
            self._lose(unit, error)
            return None
        member.is_up = True
        self._give(member)
        if unit is None:
            return None
        self._lost = 0
        assert isinstance(found, UnitMeasured)
        return found

    def _give(self, member: _Member) -> None:
        if self._waiting and not self._stopped:
            member.unit = self._waiting.popleft()
            member.call = member.actor.measure.remote(member.unit)

    def _lose(self, unit: UnitToMeasure | None, error: RayError) -> None:
        reason = reason_of(error)
        if isinstance(error, RayActorError) and unit is None:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError):
                raise UserError(cause.message, field=cause.field)
        self._lost += 1
        if self._lost > MOST_LOST:
            raise StoreError(f"workers are lost again and again: {reason}; run it again to resume")
        if unit is not None:
            self._again(unit, reason)
        if (self._waiting or self.busy) and not self._stopped:
            self._add()

    def _again(self, unit: UnitToMeasure, reason: str) -> None:
        place = (unit.pass_, unit.unit)
        self._tries[place] = self._tries.get(place, 0) + 1
        if self._tries[place] < MOST_TRIES:
            self._waiting.append(unit)
        else:
            self.failed[place] = reason

    def release(self) -> list[Any]:
        """Hand over the workers that have no unit, for another pool, also those that still start; the others are ended."""
        idle = [member for member in self._members if member.unit is None]
        self._members = [member for member in self._members if member not in idle]
        self.close()
        return [member.actor for member in idle]

    def close(self) -> None:
        """End all workers; a unit that is being measured is not written."""
        end_workers(member.actor for member in self._members)
        self._members = []
