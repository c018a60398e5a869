"""The jobs of an evaluation: their rows with stable ids, their runs, and the results.

Requests that must have the same answer are one row. Each job has a run directory that its requests and settings name:

    EVAL/requests/complete-8d1f6c35a0b2.jsonl     the rows of a job: ids, tokens
    EVAL/runs/complete-3f2a91c07d44/              its run directory

The name of the rows is a hash of their content, so that jobs of other settings have the same input and can be compared. The
name of the run is a hash of all that decides its results. The same command finds the same directories: what is finished is
only read, and what is not is resumed. Other requests or settings get directories of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.eval.spec import EvalSpec, Kind
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.errors import UserError
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import AlreadyExists
from draftmill.storage.stores.store import open_store


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """One answer that is asked for: a request (lm_eval's Instance) and which of its repeats it is, counted from 0."""

    instance: Any
    repeat: int
    doc: int

    @property
    def task(self) -> str:
        """The task's name."""
        return self.instance.task_name or "task"

    @property
    def id(self) -> str:
        """The same in every run of the evaluation: task, document, which request of the document, which repeat."""
        return f"{self.task}:{self.doc}:{self.instance.idx}:{self.repeat}"


def number_repeats(requests: Sequence[Any], chosen: Mapping[str, list[int]]) -> list[AskedAnswer]:
    """The requests with their repeats numbered; those of a request are the same object several times in a row.

    `chosen` has the documents of tasks of which only some are asked.
    """
    counts: Counter[int] = Counter()
    asked = []
    for request in requests:
        asked.append(AskedAnswer(request, counts[id(request)], document(request, chosen)))
        counts[id(request)] += 1
    return asked


def document(request: Any, chosen: Mapping[str, list[int]]) -> int:
    """The index of a request's document in its task; with chosen documents, lm_eval numbers these from 0."""
    number = request.doc_id or 0
    documents = chosen.get(request.task_name or "")
    return documents[number] if documents else number


class JobRows:
    """The input rows of one job. `add` returns the id of the row that has the answer."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._same: dict[Hashable, str] = {}

    def add(self, name: str, row: dict[str, Any], same: Hashable = None) -> str:
        """Add a row under this id; rows with the same `same` (other than None) have one answer, that of the first."""
        if same is not None and same in self._same:
            return self._same[same]
        free, count = name, 1
        while free in self._rows:  # a task that numbers its requests twice
            count += 1
            free = f"{name}:{count}"
        self._rows[free] = {"id": free, **row}
        if same is not None:
            self._same[same] = free
        return free

    def __len__(self) -> int:
        return len(self._rows)

    def lines(self) -> bytes:
        """The rows as JSON lines."""
        rows = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in self._rows.values())
        return "".join(f"{row}\n" for row in rows).encode()


LETTERS: Final = 12
"""Hexadecimal digits of a job's name."""

COLUMNS: Final = (
    "id", "status", "error_kind", "error", "tokens", "finish", "logprob", "logprob_stderr", "is_greedy", "prompt_tokens",
    "new_tokens", "truncated_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted", "device_s", "total_s",
)  # fmt: skip

Row = Mapping[str, Any]
"""A result row, with the columns above."""


@dataclass(frozen=True, slots=True)
class Results:
    """A finished job: its run directory and its result rows by id."""

    place: str
    rows: Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class EvalRuns:
    """The jobs of one evaluation; `run` runs a job until it is finished (jobs/run/job.py, complete_job)."""

    spec: EvalSpec
    run: Callable[[JobSpec], object]

    def finish(self, kind: Kind, rows: JobRows, job: Callable[[str, str], JobSpec]) -> Results:
        """Run the job over these rows, or resume it, or only read it. `job` makes its spec from paths of input and output.

        Raises Ended if the job was interrupted or too many of its rows failed, UserError if the directory is a run's.
        """
        any_job = self.spec.any_job()
        base = any_job.output.path.rstrip("/")
        store = open_store(any_job.place(base))
        lines = rows.lines()
        if store.exists(PLAN):
            raise UserError(f"{base!r} is a job's run directory; use another directory", field="output.path")
        requests = f"requests/{kind}-{hashlib.sha256(lines).hexdigest()[:LETTERS]}.jsonl"
        with suppress(AlreadyExists):  # of the same content, by its name
            store.create(requests, lines)
        place = f"{base}/runs/{kind}-{name_of(job('requests.jsonl', base), lines)}"
        self.run(job(f"{base}/{requests}", place))
        passes = passes_of(open_store(store.place.at(place)))
        answers = (row for table in latest_rows(passes, columns=COLUMNS) for row in table.to_pylist())
        return Results(place, {row["id"]: row for row in answers})


def name_of(job: JobSpec, lines: bytes) -> str:
    """A hash of the rows and of everything in the spec that decides their results."""
    settings = job.model_dump(mode="json", include={"seed", "task", "decoder", "sampling", "model"})
    settings["model"].pop("device")
    settings["truncate"] = job.input.truncate
    return digest({"settings": settings, "rows": hashlib.sha256(lines).hexdigest()})[:LETTERS]
