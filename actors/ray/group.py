"""A worker with several processes, which share one model: a group of actors on one node that lives and dies together.

The first process is a DecodeWorker like any other; the others repeat the calls of its model (decoders/backbones/split.py). All
are in one placement group. The death of any process ends the first one, which the pool reports, and the pool removes the group.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.job import Job, ModelPlace, WorkerResources
from draftmill.actors.loop.loading import load_model
from draftmill.actors.loop.worker import DecodeWorker
from draftmill.decoders.backbones.families.shares import Share
from draftmill.storage.stores.interface import S3Options

GRACE_S = 3.0
"""Seconds for the first process to report why it fails itself, before another one's death ends it."""


def open_group(name: str, job: Any, resources: WorkerResources) -> tuple[Any, Any]:
    """Ask Ray for the processes of one worker, all on one node; returns the placement group and the first actor."""
    part = _part(resources)
    bundle = {key: amount for key, amount in (("CPU", part["num_cpus"]), ("GPU", part["num_gpus"])) if amount}
    selectors = {"bundle_label_selector": [dict(resources.labels)] * resources.processes} if resources.labels else {}
    group = placement_group([bundle] * resources.processes, strategy="STRICT_PACK", **selectors)
    return group, _actor(LeadWorker, group, 0, part).remote(name, job, resources.threads, resources.processes, part)


def _part(resources: WorkerResources) -> dict[str, float]:
    """The resources of one process."""
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
        self._others = [_actor(Follower, group, rank, part).remote() for rank in range(1, processes)]
        self._serving = [
            other.serve.remote(_with_share(job.model, rank, processes), job.s3, meeting.port, threads)
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


class Follower:
    """Another process of a group: has its share of the model and repeats the first one's calls."""

    def serve(self, place: ModelPlace, s3: S3Options, port: int, threads: int) -> None:
        """Load the share and follow until the first process is gone."""
        import torch

        from draftmill.decoders.backbones.split import SplitBackbone, find_meeting, follow, join

        assert place.share is not None
        torch.set_num_threads(threads)
        join(find_meeting(port, place.share.count), place.share)
        folder = fetch_model(place.path, revision=place.revision, adapter=place.adapter, s3=s3)
        backbone = load_model(folder, place)
        assert isinstance(backbone, SplitBackbone)
        follow(backbone)
