"""Where workers run: on a Ray of our own, on an existing cluster, or in the driver's process (`run --local`).

A Ray of our own and its first workers start in a thread while the driver plans: importing what decoding needs takes longer
than planning a small job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from draftmill.actors.job import Allocation, Job, WorkerResources
from draftmill.actors.recipe import RowRecipe
from draftmill.actors.rows.makers import Maker
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.allocation import Demand, NodeRoom, allocate, lacking, possible_nodes, request_of_ray
from draftmill.jobs.drive.driver import Workers
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import (
    check_reachable,
    cluster_nodes,
    local_nodes,
    ray_is_ours_to_start,
    ray_session,
)
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.planning import Survey, survey
from draftmill.jobs.plan.resolve import Resolved
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.inputs.rows import InputFile

if TYPE_CHECKING:
    from draftmill.actors.loop.loading import ModelCache
    from draftmill.actors.measuring.measure import MeasureJob, Meters
    from draftmill.actors.ray.pool import Spare


BYTES_PER_EARLY_WORKER = 2**20
"""Input bytes per worker that is started early, before the number of units is known."""


class WorkerPool(Workers, Protocol):
    """What a run needs of a pool: what the driver uses, and the two ways to end it."""

    def close(self) -> None:
        """End all workers."""
        ...

    def resize(self, allocation: Allocation) -> None:
        """There is room for so many workers now."""
        ...

    def release(self) -> list[Any]:
        """Hand the workers over for another pool, with their networks; none writes anything more for this job."""
        ...


class Backend:
    """A place for workers. What stands here is right where nothing has to start, and the machine is the only node."""

    def check(self, spec: JobSpec) -> None:
        """Raise UserError if the backend can't provide what the spec asks for, as far as is known before anything starts."""
        raise NotImplementedError

    def opened(self, display: Display) -> AbstractContextManager[None]:
        """Workers are available during the block; nested blocks have no effect."""
        return nullcontext()

    def opening(self, display: Display, resolved: Resolved) -> AbstractContextManager[None]:
        """Like `opened`, but the block begins while the backend is still starting."""
        return nullcontext()

    def opening_for(self, display: Display, jobs: Sequence[Resolved]) -> AbstractContextManager[list[UserError | None]]:
        """Like `opening`, for several jobs. Yields for each the error if the backend can't provide what it asks for."""
        return nullcontext([None for _ in jobs])

    def survey(self, resolved: Resolved, display: Display) -> Survey:
        """How to read the rows for a plan: in this process, or by tasks of the cluster, while the backend is opening."""
        return survey

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        """How many workers of each kind fit, and the resources of each; UserError if none fits."""
        raise NotImplementedError

    def lacking(self, spec: JobSpec, allocation: Allocation) -> list[str]:
        """Notes about kinds of workers that fit nowhere now, and about devices that no worker uses."""
        return []

    def demand(self, spec: JobSpec) -> Demand | None:
        """What the job asks of the cluster's autoscaler; None if there is none."""
        return None

    def pool(self, job: Job | MeasureJob, allocation: Allocation) -> WorkerPool:
        """A pool that has no workers yet; the backend must be open."""
        raise NotImplementedError

    def retire(self, pool: WorkerPool) -> None:
        """End a pool whose job is over; a backend that keeps workers gives them to its next pool."""
        raise NotImplementedError

    def end_spare(self) -> None:
        """End the workers that are kept for the next pool: others need their place."""
        raise NotImplementedError


class LocalBackend(Backend):
    """One worker in this process. With `keep`, the networks of a job stay in memory for the next one."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._model_cache: ModelCache | None = None
        self._meters: Meters | None = None

    def check(self, spec: JobSpec) -> None:
        if len(spec.shapes) > 1:
            raise UserError(f"{len(spec.shapes)} kinds of workers, but --local has one worker", field="workers")
        (workers,) = spec.shapes
        if workers.count not in {"auto", 1}:
            raise UserError(f"{workers.count} workers, but --local has one; allowed: auto, 1", field="workers.count")
        if workers.gpus_per_model > 1:
            message = (
                f"{workers.gpus_per_model}, but --local runs a model in one process; allowed: 1, or run without --local"
            )
            raise UserError(message, field="workers.gpus_per_model")
        if workers.gpus != "auto" and workers.gpus > 1:
            raise UserError(f"{workers.gpus:g} GPUs, but --local uses one; allowed: auto, 0, 1", field="workers.gpus")
        if workers.gpus == 0 and spec.model.device.startswith("cuda"):
            raise UserError(f"{spec.model.device!r}, but workers.gpus is 0", field="model.device")

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        """See Backend; the worker has the whole machine."""
        return Allocation((WorkerResources(1.0, 0.0, len(os.sched_getaffinity(0))),), (1,))

    def lacking(self, spec: JobSpec, allocation: Allocation) -> list[str]:
        from draftmill.actors.loop.worker import idle_gpus

        idle = idle_gpus(spec.model_place().device)
        return [f"{counted(idle, 'GPU')} idle: --local uses one; without it each GPU has a worker"] if idle else []

    def pool(self, job: Job | MeasureJob, allocation: Allocation) -> WorkerPool:
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

    def retire(self, pool: WorkerPool) -> None:
        pool.release()

    def end_spare(self) -> None:
        """See Backend; there are no processes, but networks in memory."""
        self._meters = None
        if self._model_cache is not None:
            self._model_cache.clear()


class RayBackend(Backend):
    """Workers of Ray: of the cluster at `address`, or of a Ray of our own. With `keep`, they stay for the next job."""

    def __init__(self, address: str | None, *, keep: bool = False) -> None:
        self.address = address
        self._keep = keep
        self._start: _Start | None = None
        self._is_open = False
        self._spare: list[Spare] = []
        self._spare_measure = False

    def check(self, spec: JobSpec) -> None:
        check_reachable(self.address)

    @contextmanager
    def opened(self, display: Display) -> Iterator[None]:
        if self._is_open:
            self._wait()
            yield
            return
        with ray_session(self.address, note=display.note):
            yield

    @contextmanager
    def opening(self, display: Display, resolved: Resolved) -> Iterator[None]:
        spec = resolved.spec
        if not ray_is_ours_to_start(self.address):
            with ray_session(self.address, note=display.note):
                self.allocate(spec, units=1)  # fail on missing resources before writing anything
                yield
            return
        units = 1 + sum(file.size or 0 for file in resolved.inputs) // BYTES_PER_EARLY_WORKER
        allocation = self._allocate(spec, local_nodes(), units=units)
        self._start = _Start(display, resolved.info.family, spec.decoder.runs, allocation)
        self._is_open = True
        self._start.start()
        try:
            yield
        finally:
            self._is_open = False
            self._start.end()

    @contextmanager
    def opening_for(self, display: Display, jobs: Sequence[Resolved]) -> Iterator[list[UserError | None]]:
        """See Backend. The size of a Ray of our own is known before it starts."""
        if not ray_is_ours_to_start(self.address):
            with ray_session(self.address, note=display.note):
                try:
                    yield [_refusal(self._allocate_now, job.spec) for job in jobs]
                finally:
                    self.end_spare()
            return
        refusals = [_refusal(self._allocate, job.spec, local_nodes()) for job in jobs]
        first = next((job for job, error in zip(jobs, refusals, strict=True) if error is None), None)
        with nullcontext() if first is None else self.opening(display, first):
            yield refusals

    def survey(self, resolved: Resolved, display: Display) -> Survey:
        is_ours = self._start is not None
        if not pays(resolved, _num_cpus(local_nodes() if is_ours else cluster_nodes()), is_ours=is_ours):
            return survey
        self._wait()
        return cluster_survey(resolved, _num_cpus(cluster_nodes()), is_ours=is_ours, note=display.note)

    def allocate(self, spec: JobSpec, *, units: int) -> Allocation:
        self._wait()
        return self._allocate_now(spec, units=units)

    def lacking(self, spec: JobSpec, allocation: Allocation) -> list[str]:
        return lacking(spec.shapes, allocation, cluster_nodes())

    def demand(self, spec: JobSpec) -> Demand | None:
        possible = possible_nodes(spec.shapes, cluster_nodes())
        if possible is None:
            return None
        return Demand(lambda units: self._allocate(spec, possible, units=units), request_of_ray)

    def pool(self, job: Job | MeasureJob, allocation: Allocation) -> WorkerPool:
        """See Backend. Workers without a job that have other resources are ended: they would occupy the new ones' place."""
        from draftmill.actors.ray.pool import RayPool, end_workers

        if self._start is not None and (early := self._start.take_workers()):
            self._spare, self._spare_measure = early, False
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

        (resources,) = allocation.kinds  # all measure alike
        return RayPool(job.on_ray(resources), allocation, worker_class=MeasureWorker, early=spare)

    def retire(self, pool: WorkerPool) -> None:
        if self._keep:
            self._spare = pool.release()
        else:
            pool.close()

    def end_spare(self) -> None:
        if self._spare:
            from draftmill.actors.ray.pool import end_workers

            end_workers(actor for _, actor in self._spare)
        self._spare = []

    def _allocate_now(self, spec: JobSpec, *, units: int) -> Allocation:
        """An allocation on the nodes that are there; or one worker, which waits for its node, if only an autoscaler has it."""
        try:
            return self._allocate(spec, cluster_nodes(), units=units)
        except UserError:
            possible = possible_nodes(spec.shapes, cluster_nodes())
            if possible is None:
                raise
            return self._allocate(spec, possible, units=1)

    def _allocate(self, spec: JobSpec, nodes: Sequence[NodeRoom], *, units: int) -> Allocation:
        is_list = isinstance(spec.workers, tuple)
        return allocate(spec.shapes, nodes, units=units, device=spec.model.device, listed=is_list)

    def _wait(self) -> None:
        if self._start is not None:
            self._start.wait()


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

    def __init__(self, display: Display, family: str, decoder: str, found: Allocation) -> None:
        self._session = ray_session(None, note=display.note)
        self._needs, self._allocation = (family, decoder), found
        self._workers: list[Spare] = []
        self._error: BaseException | None = None
        self._is_up = False
        self._tried, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self.start = self._thread.start

    def _run(self) -> None:
        try:
            self._session.__enter__()
            self._is_up = True
            from draftmill.actors.ray.pool import early_workers

            self._workers = early_workers(self._allocation, *self._needs)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it again
            self._error = error
        self._tried.set()
        self._over.wait()

    def wait(self) -> None:
        """Return when Ray is up; raises the error of a failed start."""
        self._tried.wait()
        if self._error is not None:
            raise self._error

    def take_workers(self) -> list[Spare]:
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


# ---- planning on the cluster
#
#     small inputs, one CPU, `run --local`     the driver reads them itself, in threads, while Ray starts
#     anything else                            tasks read chunks of the inputs (actors/planning/survey_pool.py)
#
# The plan is the same to the byte.


LEAST_BYTES = 64 * 2**20
"""Smaller inputs are read sooner than processes that tokenize have started. A Ray of our own must also start first, so that
twice as much is needed there."""

LEAST_LIMIT = 1_000_000
"""With a smaller `input.limit`, most of the input is not read at all."""

MOST_TASKS = 256
"""Tasks at once, at most: the driver takes about a third of a million rows per second from them."""


def pays(resolved: Resolved, num_cpus: int, *, is_ours: bool) -> bool:
    """Whether tasks are worth their start. A tokenizer that needs code of its checkpoint stays in this process."""
    spec = resolved.spec
    size = sum(file.size or 0 for file in resolved.inputs)
    is_limited = spec.input.limit is not None and spec.input.limit < LEAST_LIMIT
    is_large = size >= LEAST_BYTES * (2 if is_ours else 1)
    return num_cpus > 1 and is_large and not is_limited and not spec.model.trust_remote_code


def cluster_survey(resolved: Resolved, num_cpus: int, *, is_ours: bool, note: Callable[[str], None]) -> Survey:
    """A survey by Ray tasks; Ray must be connected.

    In a Ray of our own the workers, which wait for the plan, hold all CPUs: tasks then ask for none, and there are as many as
    CPUs.
    """

    def survey_on_cluster(
        recipe: RowRecipe, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None, limit: int | None
    ) -> Iterator[pa.Table]:
        from draftmill.actors.planning.survey_pool import SurveyJob, SurveyPool, pack_tokenizer

        tokenizer = pack_tokenizer(resolved.folder, resolved.spec.model.tokenizer)
        job = SurveyJob(recipe, resolved.spec.kept, resolved.info, tokenizer)
        at_once = min(MOST_TASKS, num_cpus if is_ours else 2 * num_cpus)
        pool = SurveyPool(job, cpus=0 if is_ours else 1, at_once=at_once, note=note)
        return pool.tables(maker, inputs, kept, limit)

    return survey_on_cluster


def backend_of(*, address: str | None, local: bool, keep: bool = False) -> Backend:
    """The backend chosen on the command line; with `keep`, workers stay from one job to the next, with their networks."""
    return LocalBackend(keep=keep) if local else RayBackend(address, keep=keep)
