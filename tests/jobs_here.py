"""Whole jobs by the command line's own code, with one worker in this process in the place of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.job import Job
from actors.messages import PoolNews, Reported, Up, WorkUnit
from actors.pool import Seat
from actors.worker import Turns, build_runner
from jobs.cli import main


class PoolHere:
    """A pool (actors.pool.Pool) whose workers decode in `poll`."""

    def __init__(self, job: Job, seat: Seat) -> None:
        self._job = job
        self._workers: dict[str, Turns] = {}
        self._units: dict[str, list[WorkUnit]] = {}
        self._dropped: dict[str, list[int]] = {}
        self._news: list[PoolNews] = []

    def start(self, name: str) -> None:
        self._workers[name] = Turns(build_runner(self._job, name=name, node="here", threads=1), "here")
        self._units[name], self._dropped[name] = [], []
        self._news.append(Up(name, *self._workers[name].where()))

    def assign(self, name: str, unit: WorkUnit) -> None:
        self._units[name].append(unit)

    def revoke(self, name: str, lease: int) -> None:
        self._dropped[name].append(lease)

    def kill(self, name: str) -> None:
        self._workers.pop(name)

    def close(self) -> None:
        self._workers.clear()

    def poll(self, timeout_s: float) -> list[PoolNews]:
        news, self._news = self._news, []
        for name, worker in self._workers.items():
            units, dropped = self._units[name], self._dropped[name]
            self._units[name], self._dropped[name] = [], []
            news.append(Reported(name, worker.turn(units, dropped)))
        return news


@contextmanager
def _no_ray(address: str | None) -> Iterator[None]:
    yield


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, `draftmill run` and `rerun` decode in this process."""
    monkeypatch.setattr("jobs.run.ray_session", _no_ray)
    monkeypatch.setattr("jobs.run.cluster_size", lambda: (1, 0))
    monkeypatch.setattr("jobs.run.Pool", PoolHere)


def run(spec: dict[str, Any], file: Path, command: str = "run") -> int:
    """The exit code of the command line on a spec, which is written to `file`."""
    file.write_text(yaml.safe_dump(spec))
    return main([command, str(file), *(["--quiet"] if command == "run" else [])])
