"""The spec of an evaluation: a job spec without `input`, from which each kind of request gets a job of its own.

generate_until                          task complete, the spec's decoder
loglikelihood, loglikelihood_rolling    task score, the spec's decoder if it scores, else its family's that does
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from draftmill.actors.rows.chat import kwargs_problem
from draftmill.actors.task import NO_CHAT, Chat
from draftmill.decoders.settings import DECODERS, scorer_of
from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.errors import kind_changed, spec_error
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.config.yaml_file import apply_override, read_mapping
from draftmill.jobs.eval.requests import Generation
from draftmill.storage.errors import UserError

Kind = Literal["complete", "score"]

PLACE: Final = "requests.jsonl"
"""Stands for the input of a job while a spec is checked."""

WILD: Final = "*?[{"
"""Characters that make a pattern of an input path."""

OF_TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "complete": ("stop", "chat", "skip_special_tokens", "fim"),
    "score": ("chat", "mask"),
}
"""Keys of `task` that the evaluation's tasks decide."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """The checked mapping of a spec, without `task` and `chat`; `task` has the spec's own settings for its kind, or nothing."""

    data: Mapping[str, Any]
    task: Mapping[str, Any]
    chat: Chat = NO_CHAT

    @property
    def decoder(self) -> str:
        """The kind of the spec's decoder."""
        return str(self.data["decoder"]["kind"])

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
        if "complete" in DECODERS[self.decoder].tasks:
            return self.completing(Generation(1, (), 0.0), PLACE)
        task = {"kind": "infill", "mask": {"kind": "given"}}
        return check_spec(self._job(task, {"tokens": "tokens"}, PLACE, None))

    def completing(
        self, generation: Generation, path: str, out: str | None = None, *, special: bool = False
    ) -> JobSpec:
        """The job that generates; `special` searches the stop strings among the special tokens, too."""
        own = self.task if self.task.get("kind") == "complete" else {}
        task = {**own, "kind": "complete", "max_new_tokens": generation.max_new_tokens, "stop": list(generation.stop)}
        task["skip_special_tokens"] = not special
        if generation.constraint is not None:
            task["constraint"] = json.loads(generation.constraint)
        job = self._job(task, {"tokens": "tokens"}, path, out)
        cuts = {"temperature": generation.temperature, "top_k": generation.top_k, "top_p": generation.top_p}
        job["sampling"] = {**(self.data.get("sampling") or {}), **cuts, **dict(generation.others)}
        return check_spec(job)

    def scoring(self, path: str, out: str | None = None) -> JobSpec:
        """The job that scores, with the decoder that scores for the spec's models."""
        own = self.task if self.task.get("kind") == "score" else {}
        job = self._job({**own, "kind": "score"}, {"tokens": "tokens", "reference": "reference"}, path, out)
        job["decoder"] = scorer_of(self.any_job().decoder).model_dump(mode="json")
        return check_spec({key: value for key, value in job.items() if key != "sampling"})

    def _job(self, task: Mapping[str, Any], columns: Mapping[str, str], path: str, out: str | None) -> dict[str, Any]:
        job = deepcopy(dict(self.data))
        if out is not None:
            job["output"]["path"] = out
        rows = {"path": path, "columns": {"id": "id", **columns}}
        if task["kind"] != "infill":
            rows["truncate"] = "left"
        return job | {"task": dict(task), "input": rows}


def read_eval_spec(path: str | Path, overrides: Sequence[str] = ()) -> EvalSpec:
    """Read a spec file, apply `a.b=VALUE` overrides and check it. UserError with the field's path, also for what tasks decide."""
    before = {"name": Path(path).stem} | read_mapping(Path(path))
    data = deepcopy(before)
    for override in overrides:
        apply_override(data, override)
    task = data.pop("task", None)
    _check_task(task)
    chat = _chat_of(data.pop("chat", None) or {})
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
    decoder, output = data.get("decoder"), data.get("output")
    out = output.get("path") if isinstance(output, dict) else None
    if isinstance(out, str) and has_date(out):
        raise UserError(f"{out!r} has a date, which only `draftmill run` fills in", field="output.path")
    if isinstance(out, str) and (wild := sorted(set(out) & set(WILD))):
        raise UserError(
            f"{out!r} contains {wild[0]!r}; jobs read their requests from there, where it would be a pattern",
            field="output.path",
        )
    spec = EvalSpec(data, task or {}, chat)
    try:
        if not isinstance(decoder, dict) or decoder.get("kind") not in DECODERS or not isinstance(output, dict):
            check_spec({**data, "task": {"kind": "complete"}, "input": {"path": PLACE}})  # it says what is wrong
        spec.any_job()
        if spec.task.get("kind") == "score":
            spec.scoring(PLACE)
    except UserError as error:
        raise kind_changed(before, data, overrides, error) or error from None
    return spec


def _chat_of(data: Any) -> Chat:
    try:
        chat = Chat.model_validate(data, strict=True)
    except ValidationError as error:
        found = spec_error(Chat, data, error)
        raise UserError(found.message, field=".".join(filter(None, ("chat", found.field)))) from None
    if problem := kwargs_problem(chat.template_kwargs):
        raise UserError(problem, field="chat.template_kwargs")
    return chat


def _check_task(task: Any) -> None:
    if task is None:
        return
    if not isinstance(task, dict) or task.get("kind") not in OF_TASKS:
        raise UserError(
            "evaluation has tasks of its own, which complete and score texts; remove the section, or use kind complete or "
            "score with the settings that all tasks share",
            field="task",
        )
    for key in OF_TASKS[task["kind"]]:
        if key in task:
            raise UserError("the tasks decide this; remove the key", field=f"task.{key}")
