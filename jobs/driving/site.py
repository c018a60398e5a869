"""Where workers run: on a Ray of our own, on a cluster that is there, or in the driver's own process (`run --local`).

A Ray of our own starts in a thread of its own while the driver plans, and so do its first workers: they import what decoding
needs, which takes longer than planning a small job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from actors.job import Job, Seat
from jobs.driving.crew import crew
from jobs.driving.driver import Workers
from jobs.driving.progress import Display
from jobs.driving.session import check_reachable, cluster_size, local_size, ray_is_ours_to_start, ray_session
from jobs.plan.prepare import Prepared
from jobs.spec.job_spec import JobSpec
from storage.errors import UserError

BYTES_PER_EARLY_WORKER = 2**20
"""Input for which one more worker is worth starting before anybody knows how many units there are."""


class Pool(Workers, Protocol):
    """What a run needs of a pool: the driver's part, and an end."""

    def close(self) -> None:
        """End all workers."""
        ...


class Site(Protocol):
    """A place for workers."""

    def check(self, spec: JobSpec) -> None:
        """Raise UserError where the spec asks for what can't be had, as far as that can be told before anything starts."""
        ...

    def opened(self, display: Display) -> AbstractContextManager[None]:
        """For the time of the block workers can be had; a block inside of such a block changes nothing."""
        ...

    def opening(self, display: Display, prepared: Prepared) -> AbstractContextManager[None]:
        """The same, but the block begins while the site still starts."""
        ...

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """How many workers there is room for, and what each gets; UserError where not one fits."""
        ...

    def pool(self, job: Job, seat: Seat) -> Pool:
        """A pool of no workers yet; the site must be open."""
        ...


class LocalSite:
    """One worker in this process."""

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

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """See Site; the worker has the whole machine."""
        return 1, Seat(cpus=1.0, gpus=0.0, threads=len(os.sched_getaffinity(0)))

    def pool(self, job: Job, seat: Seat) -> Pool:
        """See Site."""
        from actors.local_pool import LocalPool

        return LocalPool(job, seat)


class RaySite:
    """Workers of Ray: of the cluster at `address`, or of a Ray of our own."""

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._start: _Start | None = None
        self._is_open = False

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
                self.seats(spec, units=1)  # what the cluster has not is missed before anything is written
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

    def seats(self, spec: JobSpec, *, units: int) -> tuple[int, Seat]:
        """See Site."""
        self._wait()
        return self._seats(spec, cluster_size(), units=units)

    def pool(self, job: Job, seat: Seat) -> Pool:
        """See Site."""
        from actors.pool import Pool as RayPool

        early = [] if self._start is None else self._start.take_workers(seat)
        return RayPool(job, seat, early=early)

    def _seats(self, spec: JobSpec, size: tuple[int, int], *, units: int) -> tuple[int, Seat]:
        return crew(spec.workers, num_cpus=size[0], num_gpus=size[1], units=units, device=spec.model.device)

    def _wait(self) -> None:
        if self._start is not None:
            self._start.wait()


class _Start:
    """A Ray that starts in a thread, and its first workers.

    The thread stays for as long as Ray does: Ray's processes are killed when the thread that has started them ends.
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
        except BaseException as error:  # noqa: BLE001 - it is raised again where somebody waits
            self._error = error
        self._tried.set()
        self._over.wait()

    def wait(self) -> None:
        """Return when Ray is up; raises what kept it from that."""
        self._tried.wait()
        if self._error is not None:
            raise self._error

    def take_workers(self, seat: Seat) -> list[Any]:
        """The workers that were started early; they are the caller's now. None where their seats turned out to be others."""
        if (seat.cpus, seat.gpus) != (self._seat.cpus, self._seat.gpus):
            return []
        workers, self._workers = self._workers, []
        return workers

    def end(self) -> None:
        """Let go of Ray, once it has started or failed to."""
        self._tried.wait()
        try:
            if self._is_up:
                self._session.__exit__(None, None, None)
        finally:
            self._over.set()


def site_of(*, address: str | None, local: bool) -> Site:
    """The site that the command line asks for."""
    return LocalSite() if local else RaySite(address)
