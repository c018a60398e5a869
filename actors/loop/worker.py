"""DecodeWorker: a Ray actor around a UnitRunner. Tests and benchmarks use the UnitRunner without Ray.

A turn takes new units, decodes until a unit ends or for a fifth of a second, and reports. The driver keeps two turns queued,
so the worker never waits for the driver. Ray does not restart a dead worker; its uncommitted work is lost.

LocalPool has workers in the driver's own process and thread, without Ray, for `run --local`, notebooks and tests: each has one
turn per poll. A worker that raises counts as dead, and its rows are then probed alone. A fault that ends the process also
ends the driver; committed units are safe, and the next run resumes.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from draftmill.actors.checkpoints.models import FIELD, user_error
from draftmill.actors.faults import DeviceLostError
from draftmill.actors.job import Allocation, Job, WorkerResources
from draftmill.actors.loop.loading import ModelCache, load_decoder
from draftmill.actors.loop.memory import fit, limit_gpu
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.messages import (
    LEAST_S,
    Failure,
    PoolEvent,
    Receipt,
    TurnReport,
    WorkerLoaded,
    WorkerLost,
    WorkerReported,
    WorkUnit,
)
from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.decoders.base import Decoder
from draftmill.storage.errors import UserError
from draftmill.storage.failpoints import failpoint

if TYPE_CHECKING:
    from draftmill.actors.measuring.measure import MeasureRunner

    Runner: TypeAlias = UnitRunner | MeasureRunner


class Turns:
    """The remote interface of a worker: drives a runner by calls."""

    def __init__(self, runner: Runner, node: str) -> None:
        self._runner = runner
        self._node = node

    def begin(self, name: str, job: Any, threads: int, gpus: float = 1.0) -> tuple[str, int, dict[str, Any]]:
        """Load what the job needs; returns the same as `where`."""
        self._node = socket.gethostname()
        self._runner = self._build(job, name=name, node=self._node, threads=threads, gpus=gpus)
        return self.where()

    def _build(self, job: Any, *, name: str, node: str, threads: int, gpus: float) -> Runner:
        raise NotImplementedError

    def rest(self) -> None:
        """Forget the job but keep the models. Returns after the last write: the worker then does nothing until it begins."""
        self._runner.close()
        del self._runner

    def where(self) -> tuple[str, int, dict[str, Any]]:
        """Node, process id, and facts found and chosen at the start, for the log; answers when the model is loaded."""
        return self._node, os.getpid(), self._runner.facts

    def turn(self, add: Sequence[WorkUnit], forget: Sequence[int], for_s: float = LEAST_S) -> TurnReport:
        """Forget leases, add units, then decode until there is an answer or `for_s` seconds have passed."""
        for lease in forget:
            self._runner.drop(lease)
        for unit in add:
            self._runner.add(unit)
        until_s = time.perf_counter() + for_s
        answers: list[Receipt | Failure] = []
        while self._runner.held and not answers and time.perf_counter() < until_s:
            failpoint("worker.step")
            answers = self._runner.step()
        effort, decoded = self._runner.take_effort()
        return TurnReport(tuple(answers), effort, decoded, self._runner.spent, self._runner.waiting)


class DecodeWorker(Turns):
    """One process, one device, one model in memory. `gpus` below 1 is its share of a GPU.

    It has one job at a time. A sweep gives it several: after `rest` it begins another one, with the networks that it has in
    memory where the jobs need the same.
    """

    def __init__(self, name: str, job: Job, threads: int, gpus: float = 1.0) -> None:
        self._model_cache = ModelCache()
        self.begin(name, job, threads, gpus)

    def _build(self, job: Any, **facts: Any) -> Runner:
        return build_runner(job, **facts, model_cache=self._model_cache)

    def rest(self) -> None:
        super().rest()
        self._model_cache.rest()


class EarlyWorker(DecodeWorker):
    """A worker that starts while the driver is still planning: it imports what decoding needs, and begins its job later."""

    def __init__(self, family: str, decoder: str) -> None:
        import_for_decoding(family, decoder)
        self._model_cache = ModelCache()


COLLECT_AFTER = 100_000
"""Objects allocated between two garbage collections: with Python's default, 700, these take a tenth of the import time."""


def import_for_decoding(family: str, decoder: str) -> None:
    """Import the slow modules: torch, the decoder (`module:class`), and the classes for a model family."""
    gc.set_threshold(COLLECT_AFTER)
    import draftmill.decoders.registry
    from draftmill.decoders.backbones.families.table import FAMILIES

    importlib.import_module(decoder.partition(":")[0])

    if family not in FAMILIES:
        import transformers  # noqa: F401

        import draftmill.decoders.backbones.any_causal
    elif family != "xlnet":
        import draftmill.decoders.backbones.network  # noqa: F401


def build_runner(
    job: Job, *, name: str, node: str, threads: int, gpus: float = 1.0, model_cache: ModelCache | None = None
) -> UnitRunner:
    """A runner with the job's model loaded, within its share of the machine's memory; see `build_parts`."""
    from draftmill.actors.loop.device_facts import device_facts

    began_s = time.perf_counter()
    limit_gpu(gpus)
    model_cache = model_cache or ModelCache()
    decoder, unit_io = build_parts(job, name=name, node=node, threads=threads, model_cache=model_cache)
    room = fit(decoder, threads=threads, gpus=gpus)
    facts: dict[str, Any] = {"loaded": model_cache.loaded} | ({"memory": asdict(room)} if room else {})
    facts["device"] = device_facts(decoder)
    facts["load_s"] = round(time.perf_counter() - began_s, 3)
    return UnitRunner(decoder, unit_io, worker=name, facts=facts)


def build_parts(
    job: Job, *, name: str, node: str, threads: int, model_cache: ModelCache | None = None
) -> tuple[Decoder, RowUnitIO]:
    """Load the model and everything else that a worker needs; raises UserError or ValueError if that fails.

    `model_cache` holds the networks that are in memory already.
    """
    sizes = {"unit_rows": job.unit_rows, "trace": job.trace}
    loaded = load_decoder(job.model, job.recipe, threads, job.bounds, model_cache=model_cache, **sizes)
    decoder, networks, tokenizer, info = loaded
    has_head, exact = networks.heads is not None, networks.exact
    unit_io = RowUnitIO(job, tokenizer=tokenizer, info=info, worker=name, node=node, has_head=has_head, exact=exact)
    return decoder, unit_io


@dataclass(slots=True, eq=False)
class LocalWorker:
    """A worker of this process, and the messages for its next turn."""

    runner: Runner
    turns: Turns
    add: list[WorkUnit] = field(default_factory=list)
    forget: list[int] = field(default_factory=list)


def idle_gpus(device: str) -> int:
    """How many GPUs of this machine a job in this process leaves idle; none if it decodes on the CPU."""
    import torch

    return 0 if device == "cpu" else max(0, torch.cuda.device_count() - 1)


class LocalPool:
    """Has the methods of draftmill.actors.ray.pool.Pool that the driver needs. `build` makes a runner, like build_runner.

    `model_cache` has the networks that are in memory already, and keeps those of this job for the next one.
    """

    def __init__(
        self,
        job: Any,
        resources: WorkerResources,
        *,
        build: Callable[..., Runner] = build_runner,
        model_cache: ModelCache | None = None,
    ) -> None:
        self._job, self._threads = job, resources.threads
        self._build = build if model_cache is None else partial(build, model_cache=model_cache)
        self._model_cache = model_cache
        self._node = socket.gethostname()
        self._workers: dict[str, LocalWorker] = {}
        self._events: list[PoolEvent] = []

    def resize(self, allocation: Allocation) -> None:
        """Workers of this process take no room of others."""

    def start(self, name: str) -> None:
        """Load a worker immediately; `WorkerLoaded` or `WorkerLost` follows. Raises UserError if the model is unusable."""
        try:
            runner = self._build(self._job, name=name, node=self._node, threads=self._threads)
        except UserError:
            raise
        except ValueError as error:
            raise user_error(error, FIELD) from None
        except Exception as error:  # noqa: BLE001 - any error ends only this worker
            self._clear_model_cache()
            self._events.append(WorkerLost(name, f"{type(error).__name__}: {error}"))
            return
        self._workers[name] = LocalWorker(runner, Turns(runner, self._node))
        self._events.append(WorkerLoaded(name, *self._workers[name].turns.where()))

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
            return WorkerReported(name, worker.turns.turn(add, forget))
        except Exception as error:  # noqa: BLE001 - any error ends the worker
            self.kill(name)
            self._clear_model_cache()
            # A lost device stays lost for this process: the next worker can't start, and the run ends with the reason.
            return WorkerLost(name, f"{type(error).__name__}: {error}", device=isinstance(error, DeviceLostError))

    def _clear_model_cache(self) -> None:
        """Load the networks again after any error, as a new process would."""
        if self._model_cache is not None:
            self._model_cache.clear()
