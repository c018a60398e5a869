"""Where workers run: on a Ray of our own, on an existing cluster, or in the driver's process (`run --local`).

A Ray of our own and its first workers start in a thread while the driver plans: importing what decoding needs takes longer
than planning a small job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from draftmill.actors.job import Allocation, Job, WorkerResources
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.allocation import Demand, NodeRoom, allocate, lacking, possible_nodes, request_of_ray
from draftmill.jobs.drive.driver import WorkerPool
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import (
    check_reachable,
    cluster_nodes,
    is_connected,
    local_nodes,
    ray_session,
)
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.planning import Survey, survey
from draftmill.jobs.plan.resolve import Resolved
from draftmill.storage.errors import UserError

if TYPE_CHECKING:
    from draftmill.actors.loop.loading import ModelCache
    from draftmill.actors.measuring.measure import MeasureJob, Meters
    from draftmill.actors.ray.pool import Spare


class LocalBackend:
    """One worker in this process. With `keep`, the networks of a job stay in memory for the next one."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._model_cache: ModelCache | None = None
        self._meters: Meters | None = None

    def opened(self, display: Display) -> AbstractContextManager[None]:
        """Workers are available during the block; nested blocks have no effect."""
        return nullcontext()

    def opening(self, display: Display, jobs: Sequence[Resolved]) -> AbstractContextManager[list[UserError | None]]:
        """Like `opened`, but the block begins while the backend is still starting.

        Yields for each job the error if the backend can't provide what it asks for.
        """
        return nullcontext([None for _ in jobs])

    def survey(self, resolved: Resolved, display: Display) -> Survey:
        """How to read the rows for a plan: in this process, or by tasks of the cluster, while the backend is opening."""
        return survey

    def demand(self, spec: JobSpec) -> Demand | None:
        """What the job asks of the cluster's autoscaler; None if there is none."""
        return None

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if the backend can't provide what the spec asks for, as far as is known before anything starts."""
        if len(spec.shapes) > 1:
            raise UserError(f"{len(spec.shapes)} kinds of workers, but --local has one worker", field="workers")
        (workers,) = spec.shapes
        for key in ("count", "gpus_per_model", "gpus"):
            asked = getattr(workers, key)
            if asked != "auto" and asked > 1:
                message = (
                    f"{asked:g}, but --local is one process with one GPU at most; allowed: 1, or run without --local"
                )
                raise UserError(message, field=f"workers.{key}")
        if workers.gpus == 0 and spec.model.device.startswith("cuda"):
            raise UserError(f"{spec.model.device!r}, but workers.gpus is 0", field="model.device")

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        """How many workers of each kind fit, and the resources of each; UserError if none fits."""
        return Allocation((WorkerResources(1.0, 0.0, len(os.sched_getaffinity(0))),), (1,))

    def lacking(self, spec: JobSpec, allocation: Allocation) -> list[str]:
        """Notes about kinds of workers that fit nowhere now, and about devices that no worker uses."""
        from draftmill.actors.loop.worker import idle_gpus

        idle = idle_gpus(spec.model_place().device)
        return [f"{counted(idle, 'GPU')} idle: --local uses one; without it each GPU has a worker"] if idle else []

    def pool(self, job: Job | MeasureJob, allocation: Allocation) -> WorkerPool:
        """A pool that has no workers yet; the backend must be open."""
        from draftmill.actors.loop.loading import ModelCache
        from draftmill.actors.loop.worker import LocalPool

        (resources,) = allocation.kinds
        if not isinstance(job, Job):
            from draftmill.actors.measuring.measure import Meters, measure_runner

            if self._meters is None or not self._keep:
                self._meters = Meters()
            return LocalPool(job, resources, build=partial(measure_runner, meters=self._meters))
        if self._keep and self._model_cache is None:
            self._model_cache = ModelCache()
        return LocalPool(job, resources, model_cache=self._model_cache)

    def end(self, pool: WorkerPool, *, is_over: bool) -> None:
        """End a pool; a backend that keeps workers gives them to its next pool, if the job of this one is over."""
        if is_over:
            pool.release()
        else:
            pool.close()

    def end_spare(self) -> None:
        """End what is kept for the next pool, workers or networks: others need their place."""
        self._meters = None
        if self._model_cache is not None:
            self._model_cache.clear()


class RayBackend:
    """Workers of Ray, with the methods of LocalBackend: of the cluster at `address`, or of a Ray of our own."""

    def __init__(self, address: str | None, *, keep: bool = False) -> None:
        self.address = address
        self._keep = keep
        self._start: _Start | None = None
        self._spare: list[Spare] = []
        self._spare_measure = False

    def check(self, spec: JobSpec) -> None:
        if spec.output.path.startswith("memory://"):
            raise UserError(
                f"{spec.output.path!r} is memory of one process; allowed with --local alone", field="output.path"
            )
        check_reachable(self.address)

    @contextmanager
    def opened(self, display: Display) -> Iterator[None]:
        if self._start is not None:
            self._start.wait()
            yield
            return
        with ray_session(self.address, note=display.note):
            yield

    @contextmanager
    def opening(self, display: Display, jobs: Sequence[Resolved]) -> Iterator[list[UserError | None]]:
        """The size of a Ray of our own is known before it starts."""
        if self.address is not None or is_connected():
            with ray_session(self.address, note=display.note):
                try:
                    yield [_refusal(self.allocate, job.spec) for job in jobs]
                finally:
                    self.end_spare()
            return
        refusals = [_refusal(self._allocate, job.spec, local_nodes()) for job in jobs]
        first = next((job for job, error in zip(jobs, refusals, strict=True) if error is None), None)
        if first is None:
            yield refusals
            return
        units = 1 + sum(file.size or 0 for file in first.inputs) // 2**20  # the number of units is not known yet
        allocation = self._allocate(first.spec, local_nodes(), units=units)
        self._start = _Start(display, allocation, first.info.family, first.spec.decoder.runs)
        try:
            yield refusals
        finally:
            self._start.end()
            self._start = None

    def survey(self, resolved: Resolved, display: Display) -> Survey:
        is_ours = self._start is not None
        if not pays(resolved, _num_cpus(local_nodes() if is_ours else cluster_nodes()), is_ours=is_ours):
            return survey
        if self._start is not None:
            self._start.wait()
        return cluster_survey(resolved, _num_cpus(cluster_nodes()), is_ours=is_ours, note=display.note)

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        """An allocation on the nodes that are there; or one worker, which waits for its node, if only an autoscaler has it."""
        if self._start is not None:
            self._start.wait()
        try:
            return self._allocate(spec, cluster_nodes(), units=units)
        except UserError:
            possible = possible_nodes(spec.shapes, cluster_nodes())
            if possible is None:
                raise
            return self._allocate(spec, possible, units=1)

    def lacking(self, spec: JobSpec, allocation: Allocation) -> list[str]:
        return lacking(spec.shapes, allocation, cluster_nodes())

    def demand(self, spec: JobSpec) -> Demand | None:
        possible = possible_nodes(spec.shapes, cluster_nodes())
        if possible is None:
            return None
        return Demand(lambda units: self._allocate(spec, possible, units=units), request_of_ray)

    def pool(self, job: Job | MeasureJob, allocation: Allocation) -> WorkerPool:
        """Workers without a job that have other resources are ended: they would occupy the new ones' place."""
        from draftmill.actors.ray.pool import RayPool, end_workers

        if self._start is not None and (early := self._start.wait()):
            self._spare, self._spare_measure = list(early), False
            early.clear()
        measures = not isinstance(job, Job)
        if measures != self._spare_measure:
            self.end_spare()
        self._spare_measure = measures
        places = {resources.place for resources in allocation.kinds}
        end_workers(actor for place, actor in self._spare if place not in places)
        spare, self._spare = [worker for worker in self._spare if worker[0] in places], []
        if isinstance(job, Job):
            return RayPool(job, allocation, early=spare)
        from draftmill.actors.measuring.measure import MeasureWorker

        return RayPool(job, allocation, worker_class=MeasureWorker, early=spare)

    def end(self, pool: WorkerPool, *, is_over: bool) -> None:
        if self._keep and is_over:
            self._spare = pool.release()
        else:
            pool.close()

    def end_spare(self) -> None:
        if self._spare:
            from draftmill.actors.ray.pool import end_workers

            end_workers(actor for _, actor in self._spare)
        self._spare = []

    def _allocate(self, spec: JobSpec, nodes: Sequence[NodeRoom], *, units: int) -> Allocation:
        return allocate(spec.shapes, nodes, units=units, device=spec.model.device)


Backend = LocalBackend | RayBackend
"""A place for workers."""


def _num_cpus(nodes: Iterable[NodeRoom]) -> int:
    return int(sum(node.cpus for node in nodes))


def _refusal(allocate: Callable[..., Allocation], spec: JobSpec, *nodes: Sequence[NodeRoom]) -> UserError | None:
    try:
        allocate(spec, *nodes, units=1)
    except UserError as error:
        return error
    return None


class _Start:
    """Starts a Ray and its first workers in a thread.

    The thread lives as long as Ray does: Ray's processes are killed when the thread that started them ends.
    """

    def __init__(self, display: Display, allocation: Allocation, family: str, decoder: str) -> None:
        self._display, self._early = display, (allocation, family, decoder)
        self._workers: Future[list[Spare]] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ray_session(None, note=self._display.note):
                from draftmill.actors.ray.pool import early_workers

                self._workers.set_result(early_workers(*self._early))
                self._over.wait()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            if not self._workers.done():
                self._workers.set_exception(error)

    def wait(self) -> list[Spare]:
        """Return the early workers when Ray is up; raises the error of a failed start."""
        return self._workers.result()

    def end(self) -> None:
        """Shut Ray down, once it has started or failed to."""
        self._over.set()
        self._thread.join()


# ---- planning on the cluster
#
#     small inputs, one CPU, `run --local`     the driver reads them itself, in threads, while Ray starts
#     anything else                            tasks read chunks of the inputs (actors/planning/survey_pool.py)
#
# The plan is the same to the byte.


LEAST_BYTES = 64 * 2**20
"""Smaller inputs are read sooner than processes that tokenize have started. A Ray of our own must also start first, so that
twice as much is needed there."""


def pays(resolved: Resolved, num_cpus: int, *, is_ours: bool) -> bool:
    """Whether tasks are worth their start. A tokenizer that needs code of its checkpoint stays in this process."""
    spec = resolved.spec
    size = sum(file.size or 0 for file in resolved.inputs)
    is_limited = spec.input.limit is not None and spec.input.limit < 1_000_000  # most of the input is not read at all
    is_large = size >= LEAST_BYTES * (2 if is_ours else 1)
    return num_cpus > 1 and is_large and not is_limited and not spec.model.trust_remote_code


def cluster_survey(resolved: Resolved, num_cpus: int, *, is_ours: bool, note: Callable[[str], None]) -> Survey:
    """A survey by Ray tasks; Ray must be connected.

    In a Ray of our own the workers, which wait for the plan, hold all CPUs: tasks then ask for none, and there are as many as
    CPUs.
    """

    from draftmill.actors.planning import survey_pool

    tokenizer = survey_pool.pack_tokenizer(resolved.folder, resolved.spec.model.tokenizer)
    job = survey_pool.SurveyJob(resolved.recipe, resolved.spec.kept, resolved.info, tokenizer)
    # The driver takes about a third of a million rows per second from all tasks together.
    at_once = min(256, num_cpus if is_ours else 2 * num_cpus)
    cpus = 0 if is_ours else 1
    return lambda _, *given: survey_pool.SurveyPool(job, cpus=cpus, at_once=at_once, note=note).tables(*given)


def backend_of(*, address: str | None, local: bool, keep: bool = False) -> Backend:
    """The backend chosen on the command line; with `keep`, workers stay from one job to the next, with their networks."""
    return LocalBackend(keep=keep) if local else RayBackend(address, keep=keep)
