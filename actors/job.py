"""Job: plain data with everything a worker needs to know about a job, pickled once. Never holds credentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from draftmill.actors.task import NO_CHAT, NO_PROMPT, Chat, Columns, Prompt, Side, Task
from draftmill.decoders.backbones.families.shares import Share
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.unit_table import FinishedRun, PlanPart
from draftmill.storage.stores.store import Place


@dataclass(frozen=True, slots=True)
class RowRecipe:
    """The keys of a spec that decide how rows are read, what their canvases are, and which settings a row may have.
    Planning, workers and `validate` share it.

    `prompt` has the rows of the examples in place of their file. `ends` are the end tokens of the checkpoint and the tokenizer,
    `truncate` is the side of a long prompt that is cut, None for none. `seed` is that of the samples' keys.
    """

    task: Task
    columns: Columns
    decoder: DecoderSettings
    sampling: Sampling
    ends: tuple[int, ...] = ()
    truncate: Side | None = None
    chunk_chars: int | None = None
    seed: int = 0
    prompt: Prompt = NO_PROMPT
    chat: Chat = NO_CHAT


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """The model's location and how to load it: the `model` section of a spec."""

    checkpoint: Place
    revision: str | None
    family: str
    mask_id: int | None
    tokenizer: str
    dtype: str
    device: str
    trust_remote_code: bool
    adapter: str | None = None
    exact: bool = False
    weights: str = "auto"
    share: Share | None = None
    """This process's part of the model, if several have one of it."""

    def on_ray(self, resources: WorkerResources) -> ModelPlace:
        """The place for an actor with these resources: `device: auto` is what Ray was asked for.

        An actor that asked for no GPU may still see all of its node's, and one that has one must not decode on the CPU.
        """
        return replace(self, device="cuda" if resources.gpus else "cpu") if self.device == "auto" else self


@dataclass(frozen=True, slots=True)
class Job:
    """One job, the same for all of its workers.

    `store` is the run directory. `bounds` are a worker's max_rows and max_tokens; of None it chooses one, knowing
    that units have up to `unit_rows` rows.
    `files` are the plan's inputs, and `parts` the files of its unit table, both in plan order. `keep` is the schema of
    the input columns that are copied into the results, None if there are none. Texts of `earlier` runs draft.
    """

    store: Place
    fingerprint: str
    code_version: str
    trace: bool
    model: ModelPlace
    recipe: RowRecipe
    bounds: tuple[int | None, int | None]
    unit_rows: int
    files: Sequence[InputFile]
    parts: tuple[PlanPart, ...]
    keep: pa.Schema | None = None
    earlier: tuple[FinishedRun, ...] = ()

    def on_ray(self, resources: WorkerResources) -> Job:
        """The job for an actor with these resources."""
        return replace(self, model=self.model.on_ray(resources))


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What each worker of a kind gets: Ray CPUs and GPUs (`gpus` may be a fraction), and torch threads.

    `labels` selects nodes, as pairs of Ray's label selectors. The model is split over `processes`, which share the CPUs and
    GPUs; `threads` are those of each.
    """

    cpus: float
    gpus: float
    threads: int
    labels: tuple[tuple[str, str], ...] = ()
    processes: int = 1

    @property
    def place(self) -> tuple[Any, ...]:
        """What Ray is asked for: a worker can take over another one's place if it is the same."""
        return self.cpus, self.gpus, self.labels, self.processes


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many workers (`counts`) there are of each kind, in the order of the spec's `workers`."""

    kinds: tuple[WorkerResources, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """All workers."""
        return sum(self.counts)

    @property
    def largest(self) -> tuple[int, WorkerResources]:
        """The kind with the most workers, and how many."""
        return max(zip(self.counts, self.kinds, strict=True), key=lambda pair: pair[0])

    def at_least(self, other: Allocation) -> Allocation:
        """The larger of both counts for each kind."""
        return replace(self, counts=tuple(map(max, self.counts, other.counts)))
