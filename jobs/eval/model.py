"""All that uses lm-evaluation-harness: its tasks, found and checked, and the model that it asks.

Tasks that this model can't do are refused before any work starts. The model's three kinds of requests are jobs, all tasks of a
kind at once.

Importing this module imports lm_eval (extra `lm-eval`), which takes some seconds; it imports no torch.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from draftmill.actors.rows.fim import fills_in_middle, template_of
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.sandbox.sandbox import find_sandbox
from draftmill.actors.task import Infill
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.settings import DECODERS
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.eval.infilling import FIELD, TASKS, hole_of, hole_row
from draftmill.jobs.eval.options import EvalOptions
from draftmill.jobs.eval.requests import Encoder, Generation, generation_of
from draftmill.jobs.eval.spec import (
    AskedAnswer,
    EvalSpec,
    JobRows,
    Kind,
    Results,
    Row,
    finish_job,
    number_repeats,
)
from draftmill.jobs.plan.resolve import check_task
from draftmill.storage.errors import UserError, brief

SUMS: Final = ("new_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted", "device_s", "total_s")
"""What is added up over the windows of a rolling text."""

NOT_LOGGED: Final = frozenset({"id", "tokens", "fills", "logprob", "is_greedy", "error_kind"})
"""Columns that the logged samples have in another form, or not at all."""


class DraftmillLM(LM):  # type: ignore[misc]
    """lm-evaluation-harness's model for these tasks; all of their requests are checked before the first one is answered.

    `notes` says how each request was answered: by the object's id, for each repeat the facts of its row.
    """

    def __init__(
        self,
        spec: EvalSpec,
        info: ModelInfo,
        tokenizer: Tokenizer,
        run: Callable[[JobSpec], object],
        *,
        tasks: Mapping[str, Task],
        chosen: Mapping[str, list[int]],
    ) -> None:
        super().__init__()
        self.notes: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._spec, self._info, self._tokenizer = spec, info, tokenizer
        self._finish = partial(finish_job, spec, run)
        self._encoder = Encoder(tokenizer, info)
        self._unchecked, self._chosen = tasks, chosen
        self._sampling = spec.any_job().sampling
        self._holes = {name: hole for name, task in tasks.items() if (hole := hole_of(name, task)) is not None}

    # ---- generate_until

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each request, before the first of its `until` strings; one job for each generation setting."""
        asked = self._begin(requests)
        groups: dict[tuple[Kind, Generation], list[int]] = {}
        for place, request in enumerate(asked):
            generation = self.generation(request.task, request.instance.args[1])
            groups.setdefault((self._kind(request.task), generation), []).append(place)
        answers = [""] * len(asked)
        for (kind, generation), places in groups.items():
            rows, names = JobRows(), list[str]()
            for request in (asked[place] for place in places):
                row = self._row(request)
                # Without noise, the same prompt has the same text.
                same = repr(row) if generation.temperature == 0 else None
                names.append(rows.add(request.id, row, same=same))
            results = self._finish(kind, rows, self.job_for(kind, generation))
            for place, name in zip(places, names, strict=True):
                (answer,) = self._take(asked[place], results, [name])
                if kind == "infill":
                    answers[place] = answer["fills"][0]["text"] if answer["fills"] else ""
                else:
                    answers[place] = self._tokenizer.continuation(answer["tokens"] or (), skip_special=True)
                for stop in generation.stop:
                    answers[place] = answers[place].split(stop)[0]
        return answers

    def _kind(self, task: str) -> Kind:
        return "infill" if task in self._holes else "complete"

    def _row(self, request: AskedAnswer) -> dict[str, Any]:
        columns = self._holes.get(request.task)
        if columns is None:
            return {"tokens": self._encoder.context(request.instance.args[0])}
        return hole_row(request.instance.doc, columns, spans=self._spec.knows_lengths)

    def generation(self, task: str, given: Mapping[str, Any]) -> Generation:
        """The settings for a task's generation_kwargs; UserError if they can't be met."""
        own, most, kind = self._spec, self._info.max_length, self._kind(task)
        generation = generation_of(
            given, task, sampling=self._sampling, temperature=own.temperature, most=own.max_new_tokens
        )
        is_used = kind == "complete" or self._info.kind == "causal"  # the mask says it to other models that infill
        if is_used and most is not None and generation.max_new_tokens >= most:
            raise UserError(
                f"{generation.max_new_tokens} leaves no room for a prompt; the model's length is {most} tokens; "
                "--gen_kwargs max_gen_toks=N changes it",
                field=f"{task}: generation_kwargs.max_gen_toks",
            )
        if generation.constraint or (own.task.get("kind") == kind and own.task.get("constraint")):
            return replace(generation, stop=())  # a text ends where it matches; `until` could cut it before
        return generation

    def job_for(self, kind: Kind, generation: Generation) -> JobSpec:
        """The job that generates so."""
        if kind == "infill":
            return self._spec.infilling(generation)
        special = self._tokenizer.special.values()
        hidden = any(text in stop for stop in generation.stop for text in special)
        return self._spec.completing(generation, special=hidden)

    def _take(self, request: AskedAnswer, results: Results, names: Sequence[str], **more: Any) -> list[Row]:
        """The rows that answer a request. Their sums are noted, with the other facts of one that failed or of the first."""
        rows = [results.rows[name] for name in names]
        sums = {key: sum(row[key] or 0 for row in rows) for key in SUMS if any(row[key] is not None for row in rows)}
        bad = (row for row in rows if row["status"] != "ok")
        row = {**next(bad, rows[0] if rows else {"status": "ok"}), **sums}
        place = {"id": names[0] if names else request.id, "run_dir": results.place}
        known = {key: value for key, value in row.items() if key not in NOT_LOGGED and value is not None}
        self.notes[id(request.instance)].append(place | known | more)
        return rows

    # ---- loglikelihood

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the model's first choice."""
        asked = self._begin(requests)
        rows = JobRows()
        names = [rows.add_scored(request.id, self._encoder.pair(*request.instance.args)) for request in asked]
        results = self._finish("score", rows, self._spec.scoring())
        answers = [self._take(request, results, [name])[0] for request, name in zip(asked, names, strict=True)]
        return [(_logprob(row), bool(row["is_greedy"])) for row in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the model's length that score each token once."""
        asked = self._begin(requests)
        rows = JobRows()
        names = []
        for request in asked:
            windows = enumerate(self._encoder.windows(request.instance.args[0]))
            names.append([rows.add_scored(f"{request.id}:w{number}", window) for number, window in windows])
        if not len(rows):
            return [0.0] * len(asked)
        results = self._finish("score", rows, self._spec.scoring())
        return [
            sum(map(_logprob, self._take(request, results, of_text, windows=len(of_text))))
            for request, of_text in zip(asked, names, strict=True)
        ]

    # ---- what lm_eval asks besides

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation, up to the start of the model's answer, or up to the end of the answer's given beginning."""
        chat = self._tokenizer.chat
        assert chat is not None, "a tokenizer without a chat template is refused"
        with_kwargs = partial(chat, more=self._spec.chat.template_kwargs)
        return render(with_kwargs, chat_history, begun=not add_generation_prompt)

    tokenizer_name = ""
    """It is a part of the key of lm_eval's own cache, which is not used here."""

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, for the results' record of it."""
        return getattr(self._tokenizer.chat, "source", "") if chat_template else None

    def get_model_info(self) -> dict[str, Any]:
        """What the results say of the model: the job's settings."""
        job = self._spec.any_job()
        return {
            "model_num_parameters": self._info.num_parameters,
            "draftmill": job.model_dump(mode="json", include={"seed", "decoder", "sampling", "model"}),
        }

    # ---- what the model can't do

    def check(self, options: EvalOptions) -> None:
        """UserError for a task that this model or this spec can't do, by the task's name."""
        for name, task in self._unchecked.items():
            is_unsafe, infills = getattr(task, "UNSAFE_CODE", False), name in self._holes
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"{name!r} needs images, sound or video; models here read text", field=FIELD)
            if is_unsafe and not options.confirm_run_unsafe_code:
                raise UserError(
                    f"{name!r} runs code that the model writes, on this machine; --confirm_run_unsafe_code allows it",
                    field=FIELD,
                )
            if infills and (options.apply_chat_template or options.num_fewshot):
                raise UserError(
                    f"{name!r} asks for a hole between two texts, without a conversation or examples; omit "
                    "--apply_chat_template and --num_fewshot",
                    field=FIELD,
                )
            if infills and is_unsafe:
                find_sandbox(field=FIELD)
            if str(task.OUTPUT_TYPE) in KINDS:
                self._check_kind(name, str(task.OUTPUT_TYPE))

    def _check_kind(self, name: str, request: str) -> None:
        """UserError if the model's family, or the spec's decoder, can't do the job of a kind of request."""
        own, kind = self._spec.baseline, "infill" if name in self._holes else KINDS[request]
        try:
            check_task(kind, self._info)
            if kind != "score" and kind not in own.tasks:
                allowed = [name for name, of in DECODERS.items() if of.runs_on == own.runs_on and kind in of.tasks]
                goal = "fill holes" if kind == "infill" else "complete texts"
                raise UserError(
                    f"the decoder {self._spec.decoder!r} does not {goal}; decoders of its models that do: "
                    f"{', '.join(allowed) or 'none'}"
                )
        except UserError as error:
            raise UserError(f"{name} ({request}): {error.message}", field=FIELD) from None

    def _begin(self, requests: Sequence[Any]) -> list[AskedAnswer]:
        """Number the requests. First UserError for one of all tasks' that the model or the decoder can't do."""
        tasks, self._unchecked = self._unchecked, {}
        for name, task in tasks.items():
            for kind in dict.fromkeys(request.request_type for request in task.instances):
                self._check_kind(name, kind)
        asked = [request for task in tasks.values() for request in task.instances]
        prompts = [request for request in asked if request.request_type == "generate_until"]
        for name, generation in {(each.task_name, self.generation(each.task_name, each.args[1])) for each in prompts}:
            job = self.job_for(self._kind(name), generation)
            if isinstance(job.task, Infill) and fills_in_middle(job.task, self._info):
                template_of(job.task.fim, self._tokenizer, self._info)
        return number_repeats(requests, self._chosen)


def _logprob(row: Row) -> float:
    """The row's log-probability; minus infinity for a row that failed."""
    return -math.inf if row["logprob"] is None else float(row["logprob"])


END: Final = "END_OF_THE_GIVEN_ANSWER "
"""Marks the end of a begun answer while the template renders it; the trailing space shows whether the template trims."""

Chat = Callable[[list[dict[str, Any]]], str]
"""Renders a conversation up to the start of the model's answer."""


def render(chat: Chat, messages: Sequence[dict[str, Any]], *, begun: bool) -> str:
    """A conversation (few-shot examples and a question) as a prompt; if `begun`, its last message is the start of the answer.

    A template that refuses the conversation gets it without its system messages, as in lm_eval's `hf` model. UserError if that
    does not help.
    """
    refusal: Exception | None = None
    for conversation in (messages, [message for message in messages if message.get("role") != "system"]):
        try:
            *before, last = conversation
            if not begun:
                return chat([*before, last])
            text = chat([*before, {**last, "content": last["content"] + END}])
            place = text.rindex(END.strip())
            trims = text[place : place + len(END)] != END
            return text[:place].rstrip() if trims else text[:place]
        except Exception as error:  # noqa: BLE001 - a template is the checkpoint's own program and may raise anything
            refusal = error
    reason = " ".join(str(refusal).split())[:300] or type(refusal).__name__
    raise UserError(f"the tokenizer's chat template refuses a conversation: {reason}", field="--apply_chat_template")


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


def load_tasks(options: EvalOptions, note: Callable[[str], None]) -> ChosenTasks:
    """Load all tasks; UserError for a task that is unknown or can't be loaded.

    They are looked for in `include_path` and `TASKS`, then in all that lm_eval ships, whose index takes up to a minute.
    """
    errors = list[UserError]()
    for manager in _managers(options, note):
        try:
            return _load_from(manager, options)
        except UserError as error:
            errors.append(error)
    raise errors[-1]  # that of all tasks, which knows the nearest names


def _managers(options: EvalOptions, note: Callable[[str], None]) -> Iterator[ChosenTasks]:
    """The fewest tasks come first: nothing else is indexed if they are enough. A pattern means lm_eval's tasks, too."""
    path = options.include_path
    if path is not None and not Path(path).is_dir():
        raise UserError(f"{path!r} is no folder", field="--include_path")
    only_files = all(name.endswith(".yaml") for name in options.tasks)
    own = [] if path is None else [path]
    has_pattern = any(set("*?[") & set(name) for name in options.tasks)
    if own or only_files or not has_pattern:
        first = own if has_pattern else [str(TASKS), *own]
        yield ChosenTasks(include_path=first, include_defaults=False, metadata=options.metadata)
    if not only_files:
        logging.getLogger("lm_eval.tasks._index").setLevel(logging.ERROR)  # TASKS replace some on purpose
        note("reading the index of lm-evaluation-harness's own tasks, which takes up to a minute")
        yield ChosenTasks(include_path=[str(TASKS), *own], metadata=options.metadata)


def _load_from(manager: ChosenTasks, options: EvalOptions) -> ChosenTasks:
    names = dict.fromkeys(name for given in options.tasks for name in _names(manager, given, options))
    try:
        manager.chosen = dict(TaskManager.load(manager, list(names)))
    except Exception as error:  # lm_eval and the libraries under it raise anything
        raise _unloadable(error) from error
    return manager


def _names(manager: ChosenTasks, given: str, options: EvalOptions) -> list[str]:
    """The tasks that a name, a pattern, or the path of a file or a folder stands for."""
    if given.endswith(".yaml"):
        if not Path(given).is_file():
            raise UserError(f"{given!r} is no file", field=FIELD)
        return [str(Path(given).absolute())]
    names = manager.match_tasks([given])
    if not names and Path(given).is_dir():
        names = sorted(str(file.absolute()) for file in Path(given).glob("*.yaml"))
    if not names:
        near = difflib.get_close_matches(given, manager.all_tasks, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        hint += "" if options.include_path is not None else "; --include_path FOLDER adds tasks of your own"
        raise UserError(f"{brief(given)} is no task of lm-evaluation-harness{hint}", field=FIELD)
    return list(names)


def _unloadable(error: Exception) -> UserError:
    """One line for tasks that can't be loaded: mostly a data set, or a metric, is on the hub and there is no network."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(" ".join(str(cause).split()) or type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    if any(part in text.lower() for text in texts for part in NO_NETWORK):
        return UserError(
            f"a data set or metric is on the Hugging Face hub, which can't be reached and has no copy here: {texts[0][:200]}",
            field=FIELD,
        )
    return UserError(f"can't be loaded: {type(error).__name__}: {texts[0][:300]}", field=FIELD)
