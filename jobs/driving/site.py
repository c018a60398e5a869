"""Where workers run: on a Ray of our own, on an existing cluster, or in the driver's process (`run --local`).

A Ray of our own and its first workers start in a thread while the driver plans: importing what decoding needs takes longer
than planning a small job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from actors.job import Job, Seat
from jobs.driving.cluster_survey import cluster_survey, pays
from jobs.driving.crew import crew
from jobs.driving.driver import Workers
from jobs.driving.progress import Display
from jobs.driving.session import check_reachable, cluster_size, local_size, ray_is_ours_to_start, ray_session
from jobs.plan.prepare import Prepared
from jobs.plan.survey import Survey, survey
from jobs.spec.job_spec import JobSpec
from storage.errors import UserError

if TYPE_CHECKING:
    from actors.shelf import Shelf

BYTES_PER_EARLY_WORKER = 2**20
"""Input bytes per worker that is started early, before the number of units is known."""


class WorkerPool(Workers, Protocol):
    """What a run needs of a pool: what the driver uses, and the two ways to end it."""

    def close(self) -> None:
        """End all workers."""
        ...

    def release(self) -> list[Any]:
        """Hand the workers over for another pool, with their networks; none writes anything more for this job."""
        ...


class Site(Protocol):
    """A place for workers."""

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if the site can't provide what the spec asks for, as far as is known before anything starts."""
        ...

    def opened(self, display: Display) -> AbstractContextManager[None]:
        """Workers are available during the block; nested blocks have no effect."""
        ...

    def opening(self, display: Display, prepared: Prepared) -> AbstractContextManager[None]:
        """Like `opened`, but the block begins while the site is still starting."""
        ...

    def opening_for(self, display: Display, jobs: Sequence[Prepared]) -> AbstractContextManager[list[UserError | None]]:
        """Like `opening`, for several jobs. Yields for each the error if the site can't provide what it asks for."""
        ...

    def survey(self, prepared: Prepared, display: Display) -> Survey:
        """How to read the rows for a plan: in this process, or by tasks of the cluster, while the site is opening."""
        ...

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """How many workers fit, and the resources of each; UserError if none fits."""
        ...

    def pool(self, job: Job, seat: Seat) -> WorkerPool:
        """A pool that has no workers yet; the site must be open."""
        ...

    def retire(self, pool: WorkerPool) -> None:
        """End a pool whose job is over; a site that keeps workers gives them to its next pool."""
        ...

    def end_spare(self) -> None:
        """End the workers that are kept for the next pool: others need their place."""
        ...


class LocalSite:
    """One worker in this process. With `keep`, the networks of a job stay in memory for the next one."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._shelf: Shelf | None = None

    def check(self, spec: JobSpec) -> None:
        """See Site."""
        workers = spec.workers
        if workers.count not in {"auto", 1}:
            raise UserError(f"{workers.count} workers, but --local has one; allowed: auto, 1", field="workers.count")
        if workers.gpus != "auto" and workers.gpus > 1:
            raise UserError(f"{workers.gpus:g} GPUs, but --local uses one; allowed: auto, 0, 1", field="workers.gpus")
        if workers.gpus == 0 and spec.model.device.startswith("cuda"):
            raise UserError(f"{spec.model.device!r}, but workers.gpus is 0", field="model.device")

    def opened(self, display: Display) -> AbstractContextManager[None]:
        """See Site."""
        return nullcontext()

    def opening(self, display: Display, prepared: Prepared) -> AbstractContextManager[None]:
        """See Site."""
        return nullcontext()

    def opening_for(self, display: Display, jobs: Sequence[Prepared]) -> AbstractContextManager[list[UserError | None]]:
        """See Site; `check` has found what this process can't provide."""
        return nullcontext([None for _ in jobs])

    def survey(self, prepared: Prepared, display: Display) -> Survey:
        """See Site; always in this process."""
        return survey

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """See Site; the worker has the whole machine."""
        return 1, Seat(cpus=1.0, gpus=0.0, threads=len(os.sched_getaffinity(0)))

    def pool(self, job: Job, seat: Seat) -> WorkerPool:
        """See Site."""
        from actors.local_pool import LocalPool
        from actors.shelf import Shelf

        if self._keep and self._shelf is None:
            self._shelf = Shelf()
        return LocalPool(job, seat, shelf=self._shelf)

    def retire(self, pool: WorkerPool) -> None:
        """See Site."""
        pool.release()

    def end_spare(self) -> None:
        """See Site; there are no processes, but networks in memory."""
        if self._shelf is not None:
            self._shelf.clear()


class RaySite:
    """Workers of Ray: of the cluster at `address`, or of a Ray of our own. With `keep`, they stay for the next job."""

    def __init__(self, address: str | None, *, keep: bool = False) -> None:
        self.address = address
        self._keep = keep
        self._start: _Start | None = None
        self._is_open = False
        self._spare: list[Any] = []
        self._spare_seat: tuple[float, float] | None = None

    def check(self, spec: JobSpec) -> None:
        """See Site."""
        check_reachable(self.address)

    @contextmanager
    def opened(self, display: Display) -> Iterator[None]:
        """See Site."""
        if self._is_open:
            self._wait()
            yield
            return
        with ray_session(self.address, note=display.note):
            yield

    @contextmanager
    def opening(self, display: Display, prepared: Prepared) -> Iterator[None]:
        """See Site."""
        spec = prepared.spec
        if not ray_is_ours_to_start(self.address):
            with ray_session(self.address, note=display.note):
                self.seats(spec, units=1)  # fail on missing resources before writing anything
                yield
            return
        units = 1 + sum(file.size or 0 for file in prepared.inputs) // BYTES_PER_EARLY_WORKER
        count, seat = self._seats(spec, local_size(), units=units)
        self._start = _Start(display, prepared.info.family, spec.decoder.runs, count, seat)
        self._is_open = True
        self._start.start()
        try:
            yield
        finally:
            self._is_open = False
            self._start.end()

    @contextmanager
    def opening_for(self, display: Display, jobs: Sequence[Prepared]) -> Iterator[list[UserError | None]]:
        """See Site. The size of a Ray of our own is known before it starts."""
        if not ray_is_ours_to_start(self.address):
            with ray_session(self.address, note=display.note):
                try:
                    yield self._refusals(jobs, cluster_size())
                finally:
                    self.end_spare()
            return
        found = self._refusals(jobs, local_size())
        first = next((job for job, error in zip(jobs, found, strict=True) if error is None), None)
        with nullcontext() if first is None else self.opening(display, first):
            yield found

    def survey(self, prepared: Prepared, display: Display) -> Survey:
        """See Site."""
        is_ours = self._start is not None
        if not pays(prepared, local_size()[0] if is_ours else cluster_size()[0], is_ours=is_ours):
            return survey
        self._wait()
        return cluster_survey(prepared, cluster_size()[0], is_ours=is_ours, note=display.note)

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """See Site."""
        self._wait()
        return self._seats(spec, cluster_size(), units=units)

    def pool(self, job: Job, seat: Seat) -> WorkerPool:
        """See Site. Workers without a job that have other resources are ended: they would occupy the new ones' place."""
        from actors.pool import RayPool

        if self._start is not None and (early := self._start.take_workers()):
            self._spare, self._spare_seat = early, self._start.resources
        if self._spare_seat != (seat.cpus, seat.gpus):
            self.end_spare()
        spare, self._spare, self._spare_seat = self._spare, [], (seat.cpus, seat.gpus)
        return RayPool(job, seat, early=spare)

    def retire(self, pool: WorkerPool) -> None:
        """See Site."""
        if self._keep:
            self._spare = pool.release()
        else:
            pool.close()

    def end_spare(self) -> None:
        """See Site."""
        if self._spare:
            from actors.pool import end_workers

            end_workers(self._spare)
        self._spare = []

    def _refusals(self, jobs: Sequence[Prepared], size: tuple[int, int]) -> list[UserError | None]:
        return [self._refusal(job.spec, size) for job in jobs]

    def _refusal(self, spec: JobSpec, size: tuple[int, int]) -> UserError | None:
        try:
            self._seats(spec, size, units=1)
        except UserError as error:
            return error
        return None

    def _seats(self, spec: JobSpec, size: tuple[int, int], *, units: int) -> tuple[int, Seat]:
        return crew(spec.workers, num_cpus=size[0], num_gpus=size[1], units=units, device=spec.model.device)

    def _wait(self) -> None:
        if self._start is not None:
            self._start.wait()


class _Start:
    """Starts a Ray and its first workers in a thread.

    The thread lives as long as Ray does: Ray's processes are killed when the thread that started them ends.
    """

    def __init__(self, display: Display, family: str, decoder: str, count: int, seat: Seat) -> None:
        self._session = ray_session(None, note=display.note)
        self._needs, self._count, self._seat = (family, decoder), count, seat
        self._workers: list[Any] = []
        self._error: BaseException | None = None
        self._is_up = False
        self._tried, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self.start = self._thread.start

    def _run(self) -> None:
        try:
            self._session.__enter__()
            self._is_up = True
            from actors.pool import early_workers

            self._workers = early_workers(self._count, self._seat, *self._needs)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again
            self._error = error
        self._tried.set()
        self._over.wait()

    def wait(self) -> None:
        """Return when Ray is up; raises the error of a failed start."""
        self._tried.wait()
        if self._error is not None:
            raise self._error

    @property
    def resources(self) -> tuple[float, float]:
        """CPUs and GPUs of each early worker."""
        return self._seat.cpus, self._seat.gpus

    def take_workers(self) -> list[Any]:
        """Hand the early workers over to the caller."""
        workers, self._workers = self._workers, []
        return workers

    def end(self) -> None:
        """Shut Ray down, once it has started or failed to."""
        self._tried.wait()
        try:
            if self._is_up:
                self._session.__exit__(None, None, None)
        finally:
            self._over.set()


def site_of(*, address: str | None, local: bool, keep: bool = False) -> Site:
    """The site chosen on the command line; with `keep`, workers stay from one job to the next, with their networks."""
    return LocalSite(keep=keep) if local else RaySite(address, keep=keep)
