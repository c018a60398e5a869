"""The pool: starts workers as Ray actors, keeps each busy with turns, and reports their results and deaths.

It decides nothing; jobs/schedule/scheduler.py does. Ray restarts and retries nothing (`max_restarts=0`, `max_task_retries=0`): a
lost actor is reported at once, and its units are leased again. A worker that holds units always has two turns queued, so
it keeps decoding while the driver reads its last report.

A worker may have several processes, which share one model: a group of actors on one node that lives and dies together. The first
is a DecodeWorker like any other; the others repeat the calls of its model (decoders/backbones/split.py). All are in one placement
group. The death of any process ends the first one, which the pool reports, and the pool removes the group.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.faults import DeviceLostError
from draftmill.actors.job import Allocation, Job, ModelPlace, WorkerResources
from draftmill.actors.loop.loading import load_model
from draftmill.actors.loop.worker import DecodeWorker, EarlyWorker
from draftmill.actors.messages import PoolEvent, TurnReport, WorkerLoaded, WorkerLost, WorkerReported, WorkUnit, turn_s
from draftmill.actors.ray.notices import Notices
from draftmill.decoders.backbones.families.shares import Share

Spare = tuple[tuple[Any, ...], Any]
"""A worker without a job: the place of its resources, and its actor."""

IN_FLIGHT = 2
"""Turns queued at a busy worker: one that runs and one that follows it at once."""

EXIT_S = 10.0
"""Seconds to wait for a killed worker's process to end; Ray itself waits 5 s for one that does not answer."""

GRACE_S = 3.0
"""Seconds for the first process to report why it fails itself, before another one's death ends it."""

REST_S = 30.0
"""Seconds to wait for a worker to finish its last step and its last write; a worker that takes longer is killed."""


@dataclass(slots=True, eq=False)
class PooledWorker:
    """A worker as the pool sees it: its actor, its calls in flight, oldest first, and the leases it holds."""

    actor: Any
    ready: Any
    turns: deque[Any] = field(default_factory=deque)
    leases: set[int] = field(default_factory=set)
    unsent: list[WorkUnit] = field(default_factory=list)
    knock: Any = None
    """The turn that pings an idle worker; `unsent` is sent once it has answered."""
    forget: list[int] = field(default_factory=list)
    place: tuple[str, int] | None = None
    """Its node and process, once it is up."""
    kind: int = 0
    group: Any = None
    """The placement group of a worker with several processes: removing it ends all of them."""


class RayPool:
    """Workers by name. Call all methods from the driver's thread; only `poll` waits."""

    def __init__(
        self, job: Any, allocation: Allocation, *, worker_class: type = DecodeWorker, early: Sequence[Spare] = ()
    ) -> None:
        """`job` is what a `worker_class` begins: a Job or a MeasureJob. `early` are workers that have no job, from
        `early_workers` or from another pool's `release`; `start` uses those of the same place before it starts others.
        """
        self._members: dict[str, PooledWorker] = {}
        self._allocation = allocation
        self._jobs = [ray.put(job.on_ray(resources)) for resources in allocation.kinds]
        self._notices = Notices()
        self._early = list(early)
        self._actors = [actor_class(worker_class, resources) for resources in allocation.kinds]

    def start(self, name: str) -> None:
        """Ask Ray for a worker, of the kind that lacks most; `WorkerLoaded` or `WorkerLost` follows."""
        kind = self._lacking()
        resources = self._allocation.kinds[kind]
        share = {"gpus": resources.gpus} if 0 < resources.gpus < 1 else {}
        if resources.processes > 1:
            group, actor = _open_group(name, self._jobs[kind], resources)
            self._members[name] = PooledWorker(actor, actor.where.remote(), kind=kind, group=group)
            return
        fitting = next((spare for spare in self._early if spare[0] == resources.place), None)
        if fitting is not None:
            self._early.remove(fitting)
            actor = fitting[1]
            ready = actor.begin.remote(name, self._jobs[kind], resources.threads, **share)
        else:
            actor = self._actors[kind].remote(name, self._jobs[kind], resources.threads, **share)
            ready = actor.where.remote()
        self._members[name] = PooledWorker(actor, ready, kind=kind)

    def _lacking(self) -> int:
        """The kind of worker that lacks most of its number, the first of several."""
        present = Counter(member.kind for member in self._members.values())
        missing = [count - present[kind] for kind, count in enumerate(self._allocation.counts)]
        return missing.index(max(missing))

    def resize(self, allocation: Allocation) -> None:
        """There is room for so many workers now; kinds that have lost room keep their number: it may come back."""
        self._allocation = self._allocation.at_least(allocation)

    def assign(self, name: str, unit: WorkUnit) -> None:
        """Send a unit to a worker that is up; ignores unknown workers, whose death is reported separately.

        Ray does not report the death of an idle actor. So ping it first; otherwise the new unit, perhaps a single suspected
        row, would be blamed for the death.
        """
        member = self._members.get(name)
        if member is None:
            return
        if not member.leases:
            self._turn(member, [])
            member.knock = member.turns[-1]
        member.leases.add(unit.lease)
        if member.knock is not None:
            member.unsent.append(unit)
        else:
            self._turn(member, [unit])

    def revoke(self, name: str, lease: int) -> None:
        """Tell a worker to forget a lease, with its next turn."""
        member = self._members.get(name)
        if member is not None and lease in member.leases:
            member.leases.discard(lease)
            member.unsent = [unit for unit in member.unsent if unit.lease != lease]
            member.forget.append(lease)
            self._turn(member, [])

    def kill(self, name: str) -> None:
        """End a worker's process now; it reports nothing more."""
        member = self._members.pop(name, None)
        if member is not None:
            ray.kill(member.actor, no_restart=True)
            if member.group is not None:
                remove_placement_group(member.group)

    def close(self) -> None:
        """End all workers; returns when those on this node have ended, so that none writes after the job's end."""
        places = [member.place for member in self._members.values()]
        for name in list(self._members):
            self.kill(name)
        end_workers(actor for _, actor in self._early)
        deadline_s = time.monotonic() + EXIT_S
        for place in places:
            while place is not None and is_running(*place) and time.monotonic() < deadline_s:
                time.sleep(0.01)

    def release(self) -> list[Spare]:
        """Hand the workers over for another pool, with the networks that they have in memory; this pool then has none.

        When it returns, no worker that was up writes anything more for this job: those that take longer than REST_S are
        killed, and so are workers with several processes. A worker that is still loading rests as soon as it is up.
        """
        for name in [name for name, member in self._members.items() if member.group is not None]:
            self.kill(name)
        members = list(self._members.values())
        self._members.clear()
        resting = {member.actor.rest.remote(): member for member in members}
        up = [ref for ref, member in resting.items() if member.place is not None]
        rested, late = ray.wait(up, num_returns=len(up), timeout=REST_S) if up else ([], [])
        end_workers(resting.pop(ref).actor for ref in late)
        for ref in rested:
            try:
                ray.get(ref)
            except RayError:  # it has died
                del resting[ref]
        early, self._early = self._early, []
        return [(self._allocation.kinds[member.kind].place, member.actor) for member in resting.values()] + early

    def poll(self, timeout_s: float) -> list[PoolEvent]:
        """Wait for events, at most `timeout_s`; returns the events, in order per worker."""
        owners = {ref: name for name, member in self._members.items() for ref in (member.ready, *member.turns) if ref}
        if not owners:  # nothing can happen
            time.sleep(timeout_s)
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s) if owners else ([], [])
        if ready:
            ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        arrived = set(ready)
        events: list[PoolEvent] = []
        for name in sorted({owners[ref] for ref in arrived}):
            events += self._read(name, arrived)
        return events + self._notices.of({name: member.actor for name, member in self._members.items() if member.place})

    def _turn(self, member: PooledWorker, units: list[WorkUnit]) -> None:
        member.turns.append(member.actor.turn.remote(units, member.forget, turn_s(len(self._members))))
        member.forget = []

    def _read(self, name: str, arrived: set[Any]) -> list[PoolEvent]:
        member = self._members[name]
        events: list[PoolEvent] = []
        try:
            if member.ready in arrived:
                node, pid, facts = ray.get(member.ready)
                member.place, member.ready = (node, pid), None
                events.append(WorkerLoaded(name, node, pid, facts))
            while member.turns and member.turns[0] in arrived:
                turn = member.turns.popleft()
                report: TurnReport = ray.get(turn)
                member.leases -= {item.lease for item in report.answers}
                events.append(WorkerReported(name, report))
                if turn == member.knock:
                    self._turn(member, member.unsent)
                    member.unsent, member.knock = [], None
        except RayError as error:
            self.kill(name)
            idle = member.leases == {unit.lease for unit in member.unsent}
            return [*events, WorkerLost(name, reason_of(error), idle, isinstance(error, DeviceLostError))]
        while member.leases and len(member.turns) < IN_FLIGHT:
            self._turn(member, [])
        return events


def actor_class(worker_class: type, resources: WorkerResources) -> Any:
    """A worker class as a Ray actor class with these resources, without restarts and retries."""
    options = {"label_selector": dict(resources.labels)} if resources.labels else {}
    return ray.remote(worker_class).options(
        num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=0, max_task_retries=0, **options
    )


def early_workers(allocation: Allocation, family: str, decoder: str) -> list[Spare]:
    """Start workers that import what a model family and a decoder (`module:class`) need, before they receive a job."""
    found: list[Spare] = []
    for resources, count in zip(allocation.kinds, allocation.counts, strict=True):
        if resources.processes > 1:
            continue
        worker = actor_class(EarlyWorker, resources)
        found += [(resources.place, worker.remote(family, decoder)) for _ in range(count)]
    return found


def end_workers(workers: Iterable[Any]) -> None:
    for actor in workers:
        ray.kill(actor, no_restart=True)


def is_running(node: str, pid: int) -> bool:
    """Whether a process of this node is still running; False for processes of other nodes, which are not visible here."""
    return node == socket.gethostname() and psutil.pid_exists(pid)


def reason_of(error: RayError) -> str:
    """Ray's long message in one line: the last line of a traceback, or Ray's reason for the end of the process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    detail = [line.partition("Worker exit detail:")[2].strip() for line in lines if "Worker exit detail:" in line]
    if detail:
        return detail[0]
    raised = not isinstance(error, RayActorError) or "creation task" in lines[0]
    return lines[-1] if raised else lines[0]


# ---- groups


def _open_group(name: str, job: Any, resources: WorkerResources) -> tuple[Any, Any]:
    """Ask Ray for the processes of one worker, all on one node; returns the placement group and the first actor."""
    part = _part(resources)
    bundle = {key: amount for key, amount in (("CPU", part["num_cpus"]), ("GPU", part["num_gpus"])) if amount}
    selectors = {"bundle_label_selector": [dict(resources.labels)] * resources.processes} if resources.labels else {}
    group = placement_group([bundle] * resources.processes, strategy="STRICT_PACK", **selectors)
    return group, _actor(LeadWorker, group, 0, part).remote(name, job, resources.threads, resources.processes, part)


def _part(resources: WorkerResources) -> dict[str, float]:
    return {"num_cpus": resources.cpus / resources.processes, "num_gpus": resources.gpus / resources.processes}


def _actor(actor_class: type, group: Any, bundle: int, part: dict[str, float]) -> Any:
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(actor_class).options(**part, max_restarts=0, max_task_retries=0, scheduling_strategy=where)


def _with_share(place: ModelPlace, rank: int, count: int) -> ModelPlace:
    return replace(place, share=Share(rank, count))


class LeadWorker(DecodeWorker):
    """The first process of a group: starts the others, then loads its share of the model."""

    def __init__(self, name: str, job: Job, threads: int, processes: int, part: dict[str, float]) -> None:
        from draftmill.decoders.backbones.split import join, open_meeting

        meeting = open_meeting(processes)
        group = get_current_placement_group()
        self._others = [_actor(GroupFollower, group, rank, part).remote() for rank in range(1, processes)]
        self._serving = [
            other.serve.remote(_with_share(job.model, rank, processes), meeting.port, threads)
            for rank, other in enumerate(self._others, 1)
        ]
        threading.Thread(target=self._die_with_them, name="group", daemon=True).start()
        join(meeting, Share(0, processes))
        super().__init__(name, replace(job, model=_with_share(job.model, 0, processes)), threads)

    def _die_with_them(self) -> None:
        ended, _ = ray.wait(self._serving, num_returns=1)
        try:
            ray.get(ended)
        except RayError as error:
            print(f"a process of this worker's group has ended: {error}", flush=True)
        time.sleep(GRACE_S)
        os._exit(1)


class GroupFollower:
    """Another process of a group: has its share of the model and repeats the first one's calls."""

    def serve(self, place: ModelPlace, port: int, threads: int) -> None:
        """Load the share and follow until the first process is gone."""
        import torch

        from draftmill.decoders.backbones.split import SplitBackbone, follow, join, open_meeting

        assert place.share is not None
        torch.set_num_threads(threads)
        join(open_meeting(place.share.count, port), place.share)
        folder = fetch_model(place.checkpoint, place.revision, adapter=place.adapter)
        backbone = load_model(folder, place)
        assert isinstance(backbone, SplitBackbone)
        follow(backbone)
