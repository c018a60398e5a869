"""Whole jobs without Ray: `draftmill run` with its workers in the driver's own process, one turn each in every poll."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from draftmill.actors.job import Allocation
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.loop.worker import LocalPool, build_runner
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.allocation import NodeRoom, allocate
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.driver import WorkerPool
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.resolve import Resolved
from draftmill.storage.errors import UserError

Build = Callable[..., UnitRunner]


class BackendHere(LocalBackend):
    """A cluster of so many CPUs and no GPU, all of whose workers are in this process, with one thread each."""

    def __init__(self, workers: int = 1, build: Build = build_runner) -> None:
        self._workers, self._build = workers, build

    def check(self, spec: JobSpec) -> None:
        """See Backend."""

    def opening(self, display: Display, jobs: Sequence[Resolved]) -> AbstractContextManager[list[UserError | None]]:
        """See Backend; what the cluster lacks is missed before anything is written, as with Ray."""
        for job in jobs:
            self.allocate(job.spec, units=1)
        return super().opening(display, jobs)

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        found = allocate(spec.shapes, [NodeRoom(self._workers, 0)], units=units, device=spec.model.device)
        return replace(found, kinds=tuple(replace(resources, threads=1) for resources in found.kinds))

    def pool(self, job, allocation: Allocation) -> WorkerPool:
        return LocalPool(job, allocation.kinds[0], build=partial(self._build))


@contextmanager
def without_ray(*, workers: int = 1, build: Build = build_runner) -> Iterator[None]:
    """For the time of the block jobs run without Ray, on so many CPUs."""
    backend = partial(BackendHere, workers, build)
    with patch("draftmill.jobs.run.job.backend_of", lambda **_: backend()):
        yield
