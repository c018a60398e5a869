"""Finds and loads the tasks of lm-evaluation-harness, and refuses those that this model can't do before any work starts.

Importing this module imports lm_eval (extra `lm-eval`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from draftmill.actors.task import Complete, Score
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.settings import DECODERS
from draftmill.jobs.harness.options import EvalOptions
from draftmill.jobs.harness.spec import EvalSpec, Kind
from draftmill.jobs.plan.prepare import check_task
from draftmill.storage.errors import UserError, brief

FIELD: Final = "--tasks"

KINDS: Final[Mapping[str, Kind]] = {
    "generate_until": "complete",
    "loglikelihood": "score",
    "loglikelihood_rolling": "score",
    "multiple_choice": "score",
}
"""The task of a job for each of lm_eval's kinds of requests."""

NO_NETWORK: Final = ("offline", "couldn't reach", "connection", "max retries", "resolve", "timed out", "huggingface.co")
"""Parts of the messages of errors that come from a missing network, in lower case."""


class ChosenTasks(TaskManager):  # type: ignore[misc]
    """A task manager whose tasks are loaded already: `chosen` is what lm_eval's `load` returns."""

    chosen: dict[str, Any]

    def load(self, task_list: Any) -> Any:
        """The chosen tasks, whatever is asked for."""
        return self.chosen

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by name, those of groups included."""
        return dict(self.chosen["tasks"])


@dataclass(frozen=True, slots=True)
class Finder:
    """Where tasks are looked for: `include_path`, and then all that lm_eval ships, whose index takes up to a minute."""

    options: EvalOptions
    note: Callable[[str], None] = print

    def load(self) -> ChosenTasks:
        """Load all tasks; UserError for a task that is unknown or can't be loaded."""
        error: UserError | None = None
        for manager in self._managers():
            try:
                return self._loaded(manager)
            except UserError as found:
                error = error or found
        assert error is not None
        raise error

    def _managers(self) -> Iterator[ChosenTasks]:
        """The tasks in `include_path` alone come first: nothing else is indexed if they are enough."""
        only_files = all(name.endswith(".yaml") for name in self.options.tasks)
        if self.options.include_path is not None or only_files:
            yield self._manager(defaults=False)
        if not only_files:
            self.note("reading the index of lm-evaluation-harness's own tasks, which takes up to a minute")
            yield self._manager(defaults=True)

    def _manager(self, *, defaults: bool) -> ChosenTasks:
        path = self.options.include_path
        if path is not None and not Path(path).is_dir():
            raise UserError(f"{path!r} is no folder", field="--include_path")
        return ChosenTasks(include_path=path, include_defaults=defaults, metadata=self.options.metadata)

    def _loaded(self, manager: ChosenTasks) -> ChosenTasks:
        chosen: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in dict.fromkeys(one for given in self.options.tasks for one in self._names(manager, given)):
            found = self._load_one(manager, name)
            twice = sorted(set(found["tasks"]) & set(chosen["tasks"]))
            if twice:
                raise UserError(f"{twice[0]!r} is named twice, once as a part of a group", field=FIELD)
            for part, of_part in chosen.items():
                of_part.update(found[part])
        manager.chosen = chosen
        return manager

    def _names(self, manager: ChosenTasks, given: str) -> list[str]:
        """The tasks that a name, a pattern, or the path of a file or a folder stands for."""
        if given.endswith(".yaml"):
            if not Path(given).is_file():
                raise UserError(f"{given!r} is no file", field=FIELD)
            return [str(Path(given).absolute())]
        names = manager.match_tasks([given])
        if not names and Path(given).is_dir():
            names = sorted(str(file.absolute()) for file in Path(given).glob("*.yaml"))
        if not names:
            raise self._unknown(manager, given)
        return list(names)

    def _unknown(self, manager: ChosenTasks, given: str) -> UserError:
        near = difflib.get_close_matches(given, manager.all_tasks, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        hint += "" if self.options.include_path is not None else "; --include_path FOLDER adds tasks of your own"
        return UserError(f"{brief(given)} is no task of lm-evaluation-harness{hint}", field=FIELD)

    def _load_one(self, manager: ChosenTasks, name: str) -> dict[str, Any]:
        try:
            return dict(TaskManager.load(manager, [name]))
        except Exception as error:  # lm_eval and the libraries under it raise anything
            raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> UserError:
    """One line for a task that can't be loaded: mostly its data set, or a metric, is on the hub and there is no network."""
    said = [" ".join(str(one).split()) or type(one).__name__ for one in _chain(error)]
    if any(part in text.lower() for text in said for part in NO_NETWORK):
        return UserError(
            f"{name}: its data set or metric is on the Hugging Face hub, which can't be reached and has no copy here: "
            f"{said[0][:200]}",
            field=FIELD,
        )
    return UserError(f"{name} can't be loaded: {type(error).__name__}: {said[0][:300]}", field=FIELD)


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


# ---- what the model can't do


def check_tasks(tasks: Mapping[str, Task], spec: EvalSpec, info: ModelInfo, options: EvalOptions) -> None:
    """UserError for a task that this model or this spec can't do, by the task's name."""
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"{name!r} needs images, sound or video; models here read text", field=FIELD)
        if getattr(task, "UNSAFE_CODE", False) and not options.confirm_run_unsafe_code:
            raise UserError(
                f"{name!r} runs code that the model writes, on this machine; --confirm_run_unsafe_code allows it",
                field=FIELD,
            )
        kind = KINDS.get(str(task.OUTPUT_TYPE))
        if kind is not None:
            check_kind(kind, name, str(task.OUTPUT_TYPE), spec, info)


def check_requests(tasks: Mapping[str, Task], spec: EvalSpec, info: ModelInfo) -> None:
    """The same for each request of the tasks, of which some ask in several ways."""
    for name, task in tasks.items():
        for request in dict.fromkeys(one.request_type for one in task.instances):
            check_kind(KINDS[request], name, request, spec, info)


def check_kind(kind: Kind, name: str, request: str, spec: EvalSpec, info: ModelInfo) -> None:
    """UserError if the model's family, or the spec's decoder, can't do a kind of job."""
    try:
        check_task(Complete(kind="complete") if kind == "complete" else Score(kind="score"), info)
        if kind == "complete" and kind not in DECODERS[spec.decoder].tasks:
            raise UserError(_other_decoders(kind, spec.decoder), field="decoder.kind")
    except UserError as error:
        raise UserError(f"{name} ({request}): {error.message}", field=FIELD) from None


def _other_decoders(kind: Kind, decoder: str) -> str:
    runs_on = DECODERS[decoder].runs_on
    allowed: Sequence[str] = [one for one, of in DECODERS.items() if of.runs_on == runs_on and kind in of.tasks]
    return f"the decoder {decoder!r} does not complete texts; decoders of its models that do: {', '.join(allowed) or 'none'}"
