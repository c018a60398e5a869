"""Whole jobs without Ray: `draftmill run` with its workers in the driver's own process, one turn each in every poll."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from actors.faults import DeviceLostError
from actors.job import Job
from actors.messages import Died, PoolNews, Reported, Up, WorkUnit
from actors.pool import Seat
from actors.runner import UnitRunner
from actors.worker import Turns, build_runner
from jobs import run as jobs_run

Build = Callable[..., UnitRunner]


class LocalPool:
    """What the driver needs of a pool. A worker that raises is dead, as one is whose process ended."""

    def __init__(self, job: Job, seat: Seat, *, build: Build = build_runner) -> None:
        self._build = partial(build, job, node="here", threads=1)
        self._runners: dict[str, UnitRunner] = {}
        self._add: dict[str, list[WorkUnit]] = {}
        self._forget: dict[str, list[int]] = {}
        self._news: list[PoolNews] = []

    def start(self, name: str) -> None:
        """Build a worker, here and now."""
        self._runners[name] = self._build(name=name)
        self._add[name], self._forget[name] = [], []
        self._news.append(Up(name, "here", 0))

    def assign(self, name: str, unit: WorkUnit) -> None:
        """With its next turn."""
        self._add[name].append(unit)

    def revoke(self, name: str, lease: int) -> None:
        """With its next turn."""
        self._forget[name].append(lease)

    def kill(self, name: str) -> None:
        """Forget it."""
        self._runners.pop(name).close()

    def close(self) -> None:
        """Forget all of them."""
        for name in list(self._runners):
            self.kill(name)

    def poll(self, timeout_s: float) -> list[PoolNews]:
        """One turn of each worker."""
        news, self._news = self._news, []
        return news + [self._turn(name) for name in list(self._runners)]

    def _turn(self, name: str) -> PoolNews:
        add, self._add[name] = self._add[name], []
        forget, self._forget[name] = self._forget[name], []
        try:
            return Reported(name, Turns(self._runners[name], "here").turn(add, forget))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the worker
            self.kill(name)
            return Died(name, f"{type(error).__name__}: {error}", device=isinstance(error, DeviceLostError))


@contextmanager
def without_ray(*, workers: int = 1, build: Build = build_runner) -> Iterator[None]:
    """For the time of the block jobs run without Ray, on so many CPUs."""
    fakes: dict[str, Any] = {
        "ray_session": lambda address: nullcontext(),
        "cluster_size": lambda: (workers, 0),
        "Pool": partial(LocalPool, build=build),
    }
    with patch.multiple(jobs_run, **fakes):
        yield
