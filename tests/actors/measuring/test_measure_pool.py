"""The pool of measurers on a Ray that a test plays: a worker of an earlier case that can't take the next one is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from draftmill.actors.job import WorkerResources
from draftmill.actors.measuring import measure_pool
from draftmill.actors.measuring.measure import MeasureJob, UnitMeasured, UnitToMeasure
from draftmill.actors.measuring.measure_pool import MOST_LOST, MeasurePool
from draftmill.storage.errors import StoreError, UserError

UNITS = [UnitToMeasure(1, unit, f"data/unit-{unit:08d}.parquet", 4, (0,)) for unit in range(5)]


class Call:
    """A call of an actor's method, with its answer; `remote` makes it."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.given: tuple[Any, ...] = ()

    def remote(self, *given: Any) -> Call:
        made = Call(self.answer)
        made.given = given
        return made


class Actor:
    """Measures at once; `refusal` is what `take` raises."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.where, self.take = Call(lambda *_: "node"), Call(lambda *_: refusal)
        self.measure = Call(lambda unit: UnitMeasured(unit.pass_, unit.unit, unit.object, unit.rows, 0))


class FakeRay:
    """What the pool uses of Ray."""

    def __init__(self) -> None:
        self.started: list[Actor] = []
        self.ended: list[Actor] = []
        self.refusal: Exception | None = None

    def remote(self, *_: Any) -> Actor:
        self.started.append(Actor())
        if self.refusal is not None:
            self.started[-1].where = Call(lambda *_: self.refusal)
        return self.started[-1]

    def put(self, job: Any) -> Any:
        return job

    def wait(self, calls: list[Call], **_: Any) -> tuple[list[Call], list[Call]]:
        return calls[:1], calls[1:]

    def get(self, call: Call) -> Any:
        answer = call.answer(*call.given)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(measure_pool, "ray", fake)
    monkeypatch.setattr(measure_pool, "actor_class", lambda kind, resources: fake)
    monkeypatch.setattr(measure_pool, "end_workers", fake.ended.extend)
    return fake


def measured(pool: MeasurePool) -> list[int]:
    pool.start()
    found = []
    while pool.busy:
        found += [one.unit for one in pool.poll(0.0)]
    return sorted(found)


def pool_with(*early: Actor) -> MeasurePool:
    return MeasurePool(cast(MeasureJob, "the job"), WorkerResources(1.0, 0.0, 1), 2, UNITS, list(early))


def failed(cause: Exception) -> RayTaskError:
    return RayTaskError("take", f"Traceback\n{type(cause).__name__}: {cause}", cause)


def test_a_reused_worker_that_can_not_take_the_next_job_is_replaced_and_every_unit_is_measured(fake: FakeRay) -> None:
    bad = Actor(failed(RuntimeError("out of memory")))
    pool = pool_with(bad, Actor())
    assert measured(pool) == [0, 1, 2, 3, 4] and not pool.failed
    assert fake.ended == [bad] and len(fake.started) == 1


def test_what_the_user_can_change_ends_the_pool_at_once(fake: FakeRay) -> None:
    with pytest.raises(UserError, match="no such judge"):
        measured(pool_with(Actor(failed(UserError("no such judge", field="metrics.0.path")))))


def test_workers_that_can_never_take_the_job_are_not_replaced_for_ever(fake: FakeRay) -> None:
    fake.refusal = failed(RuntimeError("out of memory"))
    with pytest.raises(StoreError, match="lost again and again: RuntimeError: out of memory; run it again to resume"):
        measured(pool_with(Actor(fake.refusal), Actor(fake.refusal)))
    assert len(fake.started) == MOST_LOST
