"""The jobs of an evaluation: its spec, a job spec without `input`, the rows of each job with stable ids, and their results.

generate_until                          task complete, the spec's decoder; infill for tasks that ask for a hole
loglikelihood, loglikelihood_rolling    task score, the spec's decoder if it scores, else its family's that does

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from draftmill.actors.task import NO_CHAT, Chat
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.settings import DECODERS, scorer_of
from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.config.yaml_file import apply_changes, read_mapping, read_overrides
from draftmill.jobs.eval.requests import Generation, ScoredTokens
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.errors import UserError
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.store import AlreadyExists, open_store

Kind = Literal["complete", "infill", "score"]

PLACE: Final = "requests.jsonl"
"""Stands for the input of a job while a spec is checked."""

WILD: Final = "*?[{"
"""Characters that make a pattern of an input path."""

OF_TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "complete": ("stop", "chat", "skip_special_tokens", "fim"),
    "infill": ("skip_special_tokens",),
    "score": ("chat", "mask"),
}
"""Keys of `task` that the evaluation's tasks decide."""

HOLES: Final[Mapping[str, Any]] = {"kind": "infill", "mask": {"kind": "marker", "length": "auto"}}
"""The task of jobs that infill, if the spec has none: the model finds the lengths."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """The checked mapping of a spec, without `task` and `chat`; `task` has the spec's own settings for its kind, or nothing."""

    data: Mapping[str, Any]
    task: Mapping[str, Any]
    chat: Chat = NO_CHAT

    @property
    def decoder(self) -> str:
        return str(self.data["decoder"]["kind"])

    @property
    def baseline(self) -> type[DecoderChoice]:
        """The settings that say what the decoder can do; `fastest` names another one's."""
        return DECODERS[self.data["decoder"].get("like", self.decoder)]

    @property
    def temperature(self) -> float | None:
        """The temperature that the spec names; None if it names none."""
        return (self.data.get("sampling") or {}).get("temperature")

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of generated tokens that the spec names; None if it names none."""
        return self.task.get("max_new_tokens")

    def any_job(self) -> JobSpec:
        """A job of this spec, for what all of them share. UserError for a spec that can't be used."""
        if "complete" in self.baseline.tasks:
            return self.completing(Generation(1, (), 0.0))
        return self._job({"kind": "infill", "mask": {"kind": "given"}}, ("tokens",))

    def completing(self, generation: Generation, *, special: bool = False) -> JobSpec:
        """The job that generates; `special` searches the stop strings among the special tokens, too."""
        own = self.task if self.task.get("kind") == "complete" else {}
        task = {**own, "kind": "complete", "max_new_tokens": generation.max_new_tokens, "stop": list(generation.stop)}
        task["skip_special_tokens"] = not special
        if generation.constraint is not None:
            task["constraint"] = json.loads(generation.constraint)
        return self._job(task, ("tokens",), sampling=self._sampled(generation))

    @property
    def holes(self) -> Mapping[str, Any]:
        """The task of jobs that infill."""
        return self.task if self.task.get("kind") == "infill" else HOLES

    @property
    def knows_lengths(self) -> bool:
        """Whether a hole has the length of its hidden text."""
        return bool(self.holes["mask"]["kind"] == "spans")

    def infilling(self, generation: Generation) -> JobSpec:
        """The job that fills holes; a causal model's have the tasks' own maximum number of tokens."""
        task = dict(self.holes)
        if self.baseline.runs_on == "causal":
            task["max_new_tokens"] = generation.max_new_tokens
        if generation.constraint is not None:
            task["constraint"] = json.loads(generation.constraint)
        columns = ("text", "spans") if self.knows_lengths else ("prefix", "suffix")
        return self._job(task, columns, sampling=self._sampled(generation))

    def _sampled(self, generation: Generation) -> dict[str, Any]:
        cuts = {"temperature": generation.temperature, "top_k": generation.top_k, "top_p": generation.top_p}
        return {**(self.data.get("sampling") or {}), **cuts, **dict(generation.others)}

    def scoring(self) -> JobSpec:
        """The job that scores, with the decoder that scores for the spec's models."""
        own = self.task if self.task.get("kind") == "score" else {}
        decoder = scorer_of(self.any_job().decoder).model_dump(mode="json")
        return self._job({**own, "kind": "score"}, ("tokens", "reference"), decoder=decoder, sampling={})

    def _job(self, task: Mapping[str, Any], columns: Sequence[str], **sections: Any) -> JobSpec:
        truncate = None if task["kind"] == "infill" else "left"
        rows = {"path": PLACE, "columns": {name: name for name in ("id", *columns)}, "truncate": truncate}
        return check_spec({**self.data, "task": dict(task), "input": rows, **sections})


def read_eval_spec(path: str | Path, overrides: Sequence[str] = ()) -> EvalSpec:
    """Read a spec file, apply `a.b=VALUE` overrides and check it. UserError with the field's path, also for what tasks decide."""
    data = {"name": Path(path).stem} | read_mapping(Path(path))
    apply_changes(data, read_overrides(overrides))
    task = data.pop("task", None)
    _check_task(task)
    chat = data.pop("chat", None)
    for key, reason in (
        ("input", "the tasks give the rows"),
        ("prompt", "the tasks have prompts of their own"),
        ("metrics", "the tasks have their own metrics"),
    ):
        if data.get(key):
            raise UserError(f"{reason}; remove the section", field=key)
        data.pop(key, None)
    if (data.get("sampling") or {}).get("n", 1) != 1:
        raise UserError("a task's own `repeats` say how many samples it takes; allowed: 1", field="sampling.n")
    if isinstance(data.get("decoder"), str):
        data["decoder"] = {"kind": data["decoder"]}
    decoder, output = data.get("decoder"), data.get("output")
    if isinstance(decoder, dict) and decoder.get("kind") == "fastest" and decoder.get("like") not in DECODERS:
        raise UserError("an evaluation with 'fastest' names its baseline, such as autoregressive", field="decoder.like")
    out = output.get("path") if isinstance(output, dict) else None
    if isinstance(out, str) and has_date(out):
        raise UserError(f"{out!r} has a date, which only `draftmill run` fills in", field="output.path")
    if isinstance(out, str) and (wild := sorted(set(out) & set(WILD))):
        raise UserError(
            f"{out!r} contains {wild[0]!r}; jobs read their requests from there, where it would be a pattern",
            field="output.path",
        )
    spec = EvalSpec(data, task or {})
    if not isinstance(decoder, dict) or decoder.get("kind") not in DECODERS or not isinstance(output, dict):
        check_spec({**data, "task": {"kind": "complete"}, "input": {"path": PLACE}})  # it says what is wrong
    spec.any_job()
    if spec.task.get("kind") == "score":
        spec.scoring()
    if spec.task.get("kind") == "infill":
        spec.infilling(Generation(1, (), 0.0))
    if chat is not None:
        chatting = {"task": {"kind": "score", "chat": True}, "input": {"path": PLACE}, "chat": chat}
        return replace(spec, chat=check_spec(spec.scoring().model_dump(mode="json") | chatting).chat)
    return spec


def _check_task(task: Any) -> None:
    if task is None:
        return
    if not isinstance(task, dict) or task.get("kind") not in OF_TASKS:
        raise UserError(
            "evaluation has tasks of its own, which complete, infill and score texts; remove the section, or use kind complete, "
            "infill or score with the settings that all tasks share",
            field="task",
        )
    if task["kind"] == "infill":
        mask = task.get("mask")
        if (kind := mask.get("kind") if isinstance(mask, dict) else None) not in {"marker", "spans"}:
            raise UserError(
                f"{kind!r}; the tasks say where holes are; allowed: marker, whose length is a number, a range or auto; spans, "
                "for the length of the hidden text",
                field="task.mask.kind",
            )
    for key in OF_TASKS[task["kind"]]:
        if key in task:
            raise UserError("the tasks decide this; remove the key", field=f"task.{key}")


# ---- the jobs: their rows with stable ids, their runs, and the results


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """One answer that is asked for: a request (lm_eval's Instance) and which of its repeats it is, counted from 0."""

    instance: Any
    repeat: int
    doc: int

    @property
    def task(self) -> str:
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

    def add_scored(self, name: str, text: ScoredTokens) -> str:
        """Add a row of which a part is scored; the same text has the same answer."""
        return self.add(name, {"tokens": text.context, "reference": text.scored}, same=text)

    def __len__(self) -> int:
        return len(self._rows)

    def lines(self) -> bytes:
        rows = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in self._rows.values())
        return "".join(f"{row}\n" for row in rows).encode()


COLUMNS: Final = (
    "id", "status", "error_kind", "error", "tokens", "fills", "finish", "logprob", "logprob_stderr", "is_greedy", "prompt_tokens",
    "new_tokens", "truncated_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted", "device_s", "total_s",
)  # fmt: skip

Row = Mapping[str, Any]
"""A result row, with the columns above."""


@dataclass(frozen=True, slots=True)
class Results:
    """A finished job: its run directory and its result rows by id."""

    place: str
    rows: Mapping[str, Row]


def finish_job(spec: EvalSpec, run: Callable[[JobSpec], object], kind: Kind, rows: JobRows, job: JobSpec) -> Results:
    """Run the job over these rows, or resume it, or only read it; its input and output are found here.

    Raises Ended as `run`, which runs a job until it is finished, and UserError if the directory is a run's.
    """
    base = job.output.path.rstrip("/")
    store = open_store(job.place(base))
    if store.exists(PLAN):
        raise UserError(f"{base!r} is a job's run directory; use another directory", field="output.path")
    lines = rows.lines()
    requests = f"requests/{kind}-{hashlib.sha256(lines).hexdigest()[:12]}.jsonl"
    with suppress(AlreadyExists):  # of the same content, by its name
        store.create(requests, lines)
    place = f"{base}/runs/{kind}-{name_of(job, lines)}"
    places = {"input.path": f"{base}/{requests}", "output.path": place}
    run(check_spec(job.model_dump(mode="json", exclude_unset=True), places.items()))
    passes = passes_of(open_store(store.place.at(place)))
    answers = (row for table in latest_rows(passes, columns=COLUMNS) for row in table.to_pylist())
    return Results(place, {row["id"]: row for row in answers})


def name_of(job: JobSpec, lines: bytes) -> str:
    """A hash of the rows and of everything in the spec that decides their results."""
    settings = job.model_dump(mode="json", include={"seed", "task", "decoder", "sampling", "model"})
    settings["model"].pop("device")
    settings["truncate"] = job.input.truncate
    return digest({"settings": settings, "rows": hashlib.sha256(lines).hexdigest()})[:12]
