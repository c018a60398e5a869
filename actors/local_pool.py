"""A pool without Ray: workers in the driver's own process and thread, each of which has one turn in every poll.

For `run --local`, notebooks and tests. A worker that raises is lost, as one is whose process ended, and its rows are looked at
alone; but what ends a process ends the driver with it. Nothing is lost then either: the next run goes on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.faults import DeviceLostError
from actors.job import Job, Seat
from actors.messages import Died, PoolNews, Reported, Up, WorkUnit
from actors.models import FIELD, user_error
from actors.runner import UnitRunner
from actors.worker import Turns, build_runner
from storage.errors import UserError

Build = Callable[..., UnitRunner]


@dataclass(slots=True, eq=False)
class Here:
    """A worker of this process, and what it is told with its next turn."""

    runner: UnitRunner
    turns: Turns
    add: list[WorkUnit] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)


class LocalPool:
    """What the driver needs of a pool (actors.pool.Pool). `build` makes a runner as actors.worker.build_runner does."""

    def __init__(self, job: Job, seat: Seat, *, build: Build = build_runner) -> None:
        self._job, self._threads, self._build = job, seat.threads, build
        self._node = socket.gethostname()
        self._workers: dict[str, Here] = {}
        self._news: list[PoolNews] = []

    def start(self, name: str) -> None:
        """Load a worker, here and now; `Up` or `Died` follows. Raises UserError where the model is unusable."""
        try:
            runner = self._build(self._job, name=name, node=self._node, threads=self._threads)
        except UserError:
            raise
        except ValueError as error:
            raise user_error(error, FIELD) from None
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this worker alone
            self._news.append(Died(name, f"{type(error).__name__}: {error}"))
            return
        self._workers[name] = Here(runner, Turns(runner, self._node))
        self._news.append(Up(name, *self._workers[name].turns.where()))

    def assign(self, name: str, unit: WorkUnit) -> None:
        """Give a worker a unit with its next turn; a worker that is gone is ignored."""
        if name in self._workers:
            self._workers[name].add.append(unit)

    def revoke(self, name: str, lease: int) -> None:
        """Tell a worker with its next turn to forget a lease."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.add = [unit for unit in worker.add if unit.lease != lease]
            worker.forget.append(lease)

    def kill(self, name: str) -> None:
        """Forget a worker; what its clerk is writing is written to its end."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.runner.close()

    def close(self) -> None:
        """Forget all workers."""
        for name in list(self._workers):
            self.kill(name)

    def poll(self, timeout_s: float) -> list[PoolNews]:
        """One turn of each worker that has something to do; where none has, wait."""
        news, self._news = self._news, []
        busy = [name for name, worker in self._workers.items() if worker.runner.held or worker.add or worker.forget]
        if not busy and not news:
            time.sleep(timeout_s)
        return news + [self._turn(name) for name in busy]

    def _turn(self, name: str) -> PoolNews:
        worker = self._workers[name]
        add, worker.add = worker.add, []
        forget, worker.forget = worker.forget, []
        try:
            return Reported(name, worker.turns.turn(add, forget))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the worker
            self.kill(name)
            # No other worker of this process gets the device back: the next one can't start, and the run ends with the reason.
            return Died(name, f"{type(error).__name__}: {error}", device=isinstance(error, DeviceLostError))
