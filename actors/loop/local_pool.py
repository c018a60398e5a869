"""A pool without Ray: workers in the driver's own process and thread; each has one turn per poll.

For `run --local`, notebooks and tests. A worker that raises counts as dead, as if its process had ended, and its rows are then
probed alone. A fault that ends the process also ends the driver; committed units are safe, and the next run resumes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftmill.actors.checkpoints.models import FIELD, user_error
from draftmill.actors.faults import DeviceLostError
from draftmill.actors.job import Allocation, Job, WorkerResources
from draftmill.actors.loop.loading import ModelCache
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.loop.worker import Turns, build_runner
from draftmill.actors.messages import Died, PoolEvent, Reported, Up, WorkUnit
from draftmill.storage.errors import UserError

Build = Callable[..., UnitRunner]


@dataclass(slots=True, eq=False)
class Here:
    """A worker of this process, and the messages for its next turn."""

    runner: UnitRunner
    turns: Turns
    add: list[WorkUnit] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)


class LocalPool:
    """Has the methods of draftmill.actors.ray.pool.Pool that the driver needs. `build` makes a runner, like build_runner.

    `model_cache` has the networks that are in memory already, and keeps those of this job for the next one.
    """

    def __init__(
        self,
        job: Job,
        resources: WorkerResources,
        *,
        build: Build = build_runner,
        model_cache: ModelCache | None = None,
    ) -> None:
        self._job, self._threads = resources.job(job), resources.threads
        self._build = build if model_cache is None else partial(build, model_cache=model_cache)
        self._model_cache = model_cache
        self._node = socket.gethostname()
        self._workers: dict[str, Here] = {}
        self._events: list[PoolEvent] = []

    def kind_of(self, name: str) -> int:
        """There is one kind of worker."""
        return 0

    def resize(self, allocation: Allocation) -> None:
        """Workers of this process take no room of others."""

    def start(self, name: str) -> None:
        """Load a worker immediately; `Up` or `Died` follows. Raises UserError if the model is unusable."""
        try:
            runner = self._build(self._job, name=name, node=self._node, threads=self._threads)
        except UserError:
            raise
        except ValueError as error:
            raise user_error(error, FIELD) from None
        except Exception as error:  # noqa: BLE001 - any error ends only this worker
            self._clear_model_cache()
            self._events.append(Died(name, f"{type(error).__name__}: {error}"))
            return
        self._workers[name] = Here(runner, Turns(runner, self._node))
        self._events.append(Up(name, *self._workers[name].turns.where()))

    def assign(self, name: str, unit: WorkUnit) -> None:
        """Give a worker a unit with its next turn; ignores dead workers."""
        if name in self._workers:
            self._workers[name].add.append(unit)

    def revoke(self, name: str, lease: int) -> None:
        """Tell a worker with its next turn to forget a lease."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.add = [unit for unit in worker.add if unit.lease != lease]
            worker.forget.append(lease)

    def kill(self, name: str) -> None:
        """Forget a worker; waits until its UnitIO has finished writing."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.runner.close()

    def close(self) -> None:
        """Forget all workers."""
        for name in list(self._workers):
            self.kill(name)

    def release(self) -> list[Any]:
        """Like `close`, but networks in the cache stay; there are no processes to hand over."""
        self.close()
        if self._model_cache is not None:
            self._model_cache.rest()
        return []

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        """Run one turn of each worker that has work; if none has, wait."""
        events, self._events = self._events, []
        busy = [name for name, worker in self._workers.items() if worker.runner.held or worker.add or worker.forget]
        if not busy and not events:
            time.sleep(timeout_s)
        return events + [self._turn(name) for name in busy]

    def _turn(self, name: str) -> PoolEvent:
        worker = self._workers[name]
        add, worker.add = worker.add, []
        forget, worker.forget = worker.forget, []
        try:
            return Reported(name, worker.turns.turn(add, forget))
        except Exception as error:  # noqa: BLE001 - any error ends the worker
            self.kill(name)
            self._clear_model_cache()
            # A lost device stays lost for this process: the next worker can't start, and the run ends with the reason.
            return Died(name, f"{type(error).__name__}: {error}", device=isinstance(error, DeviceLostError))

    def _clear_model_cache(self) -> None:
        """Load the networks again after any error, as a new process would."""
        if self._model_cache is not None:
            self._model_cache.clear()
