"""Resolves a spec: loads, checks and hashes, before anything is written, what it refers to.

    spec -> schemas, examples -> plan of an earlier start -> model, tokenizer, inputs -> hashes -> checks -> Resolved

Every problem that a user can cause raises a UserError here, with the field's path.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path
from typing import Any

from draftmill.actors.checkpoints.generation import from_checkpoint
from draftmill.actors.checkpoints.models import (
    adapter_hash,
    fetch_model,
    hash_files,
    model_hash,
    tokenizer_hash,
    user_error,
)
from draftmill.actors.job import Job, RowRecipe
from draftmill.actors.loop.loading import check_drafter, fetch_drafter
from draftmill.actors.rows.constraints import ConstraintMaker, node_of
from draftmill.actors.rows.fim import fills_in_middle, template_of
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import body_of
from draftmill.actors.rows.row_settings import RowRules, penalties_of
from draftmill.actors.rows.stop_text import end_ids
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.actors.task import Complete, ConstraintSettings, Examples, Infill, Prompt, Task, today
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import DecoderChoice, DrafterPlace, Sampling
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.fastest import FastestSettings
from draftmill.decoders.settings import DECODERS, check_model
from draftmill.jobs.config.dates import read_date
from draftmill.jobs.config.paths import absolute
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import Notes, counted, size_text
from draftmill.jobs.plan.fingerprint import digest, results_key, with_files
from draftmill.jobs.plan.plan import Plan, compare_inputs, compare_plan, compare_settings, earlier_runs, load_plan
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.inputs.kept import plain
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.inputs.rows import InputFile, InputFiles
from draftmill.storage.inputs.sources import with_known_hashes
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import MANIFEST, is_closed
from draftmill.storage.runs.unit_table import PLAN, FinishedRun, parts_of
from draftmill.storage.stores.store import Place, Store, about, open_store


@dataclass(frozen=True, slots=True)
class Resolved:
    """What will run: a spec as it was written, and what it refers to, which is usable. `resolve` makes it.

    `recipe` has the task, prompt and sampling that are used: with the schemas, the rows of the examples, the chat's date and the
    checkpoint's settings. `results` is everything that results depend on, but for the inputs' contents. `plan` is the run
    directory's plan of the same job, or None; `constraints` describes the automata of the task; `earlier` runs draft.

    A new job whose input is a run has no inputs yet: jobs/results/run_input.py makes them.
    """

    spec: JobSpec
    recipe: RowRecipe
    results: dict[str, Any]
    folder: Path
    info: ModelInfo
    tokenizer: Tokenizer | None
    inputs: list[InputFile]
    plan: Plan | None = None
    constraints: tuple[str, ...] = ()
    earlier: tuple[FinishedRun, ...] = ()

    @property
    def recorded(self) -> JobSpec:
        """The spec as a plan records it."""
        return recorded(self.spec, self.recipe)

    def maker(self) -> Maker:
        return maker_for(self.recipe, self.tokenizer, self.info)


def recorded(spec: JobSpec, recipe: RowRecipe) -> JobSpec:
    """The spec with what it refers to in the place of the references: a plan is compared and read without them."""
    return spec.model_copy(update={"task": recipe.task, "prompt": recipe.prompt, "sampling": recipe.sampling})


def resolve(
    spec: JobSpec,
    store: Store,
    display: Notes | None = None,
    *,
    inputs: list[InputFile] | None = None,
    day: date | None = None,
) -> Resolved:
    """Check the run directory, the model and the inputs; raises UserError if one of them is unusable.

    Compares settings with an existing plan first, before it fetches or hashes weights, which may take long. `inputs` are those
    that were listed already, `day` is the date that chats of a new plan see in place of the job's own.
    """
    plan = load_plan(store)
    if plan is not None:
        spec = with_baseline(spec, plan.spec.decoder)
    recipe = replace(spec.recipe(), task=with_schemas(spec.task), prompt=with_examples(spec))
    if plan is not None:
        recipe = as_planned(spec, recipe, plan)
        compare_settings(plan, recorded(spec, recipe))
    folder, info, tokenizer = open_model(spec)
    spec = with_baseline(spec, info)
    recipe = replace(recipe, decoder=spec.recipe().decoder)
    if spec.sampling.from_checkpoint:
        recipe = with_sampling(spec, recipe, folder)
    planned = None if plan is None else plan.results["input"].get("run")
    run = None if spec.input.run is None else run_state(spec.place(spec.input.run), planned)
    if run is not None:
        inputs = [] if plan is None else copied_files(plan, store)
    elif inputs is None:
        inputs = list_inputs(*spec.input_places, delimiter=spec.input.delimiter)
    if plan is not None:
        if spec.input.since is not None:
            inputs = planned_files(inputs, plan.files)
        inputs = with_known_hashes(inputs, {file.name: file for file in plan.files})
        compare_inputs(plan, inputs)
    elif sees_date(recipe, tokenizer, inputs):
        recipe = replace(recipe, task=with_chat_date(recipe.task, day or day_of(spec)))
    recipe = replace(recipe, ends=end_ids(recipe.task, folder, tokenizer, info))
    drafter = fim = None
    if (place := fetch_drafter(spec.decoder, spec.s3.options())) is not None:
        drafter = check_drafter(place, folder, info, tokenizer, spec.model_place(), decoder=spec.decoder)
    if isinstance(recipe.task, Infill) and fills_in_middle(recipe.task, info):
        fim = template_of(recipe.task.fim, tokenizer, info).key()
    same_tokens = tokenizer_hash(folder, spec.model.tokenizer)
    earlier, fingerprints = earlier_runs(spec, same_tokens, plan, display or Notes())
    results = results_key(
        recorded(spec, recipe),
        info,
        model=_hash_model(folder, display or Notes()),
        adapter=adapter_hash(folder),
        tokenizer=same_tokens,
        runs=fingerprints,
        head=head_hash(spec),
        drafter=drafter,
        begin=None if tokenizer is None else tokenizer.bos_id,
        ends=recipe.ends,
        fim=fim,
        run=run,
    )
    check_recipe(recipe, tokenizer, info)
    constraints = check_constraint(recipe, tokenizer, info)
    if plan is not None:
        compare_plan(plan, recorded(spec, recipe), with_files(results, inputs), inputs)
    elif next(store.list("data/"), None) is not None:
        raise UserError(f"{store.url} has results but no {PLAN}; use another directory", field="output.path")
    return Resolved(spec, recipe, results, folder, info, tokenizer, inputs, plan, constraints, earlier)


def inputs_of(plan: Plan) -> list[InputFile]:
    """The inputs of a plan, in its order, where they are now; UserError if one is missing or has changed."""
    if plan.spec.input.run is not None:
        listed = copied_files(plan, plan.store)
    else:
        spec = plan.spec.with_s3(plan.store.place.s3)
        listed = list_inputs(*spec.input_places, delimiter=spec.input.delimiter)
    inputs = with_known_hashes(planned_files(listed, plan.files), {file.name: file for file in plan.files})
    compare_inputs(plan, inputs)
    return inputs


def resolved_of(plan: Plan) -> Resolved:
    """What a plan's run ran, to show it: with the model where it is now, of which nothing is compared."""
    spec = plan.spec.with_s3(plan.store.place.s3)
    recipe, drafts = spec.recipe(plan.results["task"].get("ends", ())), tuple[FinishedRun, ...]()
    folder, info, tokenizer = open_model(spec)
    with suppress(UserError):  # a run that drafted is gone
        drafts, _ = earlier_runs(spec, plan.results["model"]["tokenizer"], plan, Notes())
    return Resolved(spec, recipe, plan.results, folder, info, tokenizer, list(plan.files), plan, earlier=drafts)


def with_baseline(spec: JobSpec, of: ModelInfo | DecoderChoice) -> JobSpec:
    """The job with the baseline of `fastest`: a model's, or a plan's; UserError if keys do not fit it."""
    decoder = spec.decoder
    if not isinstance(decoder, FastestSettings):
        return spec
    try:
        if isinstance(of, ModelInfo):
            decoder = decoder.for_model(of)
        elif isinstance(of, FastestSettings) and decoder.is_open:
            decoder = decoder.model_copy(update={"like": of.like})
        spec = spec.model_copy(update={"decoder": decoder})
        spec.check_together()
    except ValueError as error:
        raise user_error(error, "decoder.kind") from None
    return spec


def with_schemas(task: Task) -> Task:
    """The task with the contents of the files that hold JSON Schemas; UserError with every keyword that can't be kept."""
    match getattr(task, "constraint", None):
        case None:
            return task
        case dict() as rules:
            read: Any = {name: _with_schema(rule) for name, rule in rules.items()}
        case tuple() as rules:
            read = tuple(rule and _with_schema(rule) for rule in rules)
        case rule:
            read = _with_schema(rule)
    return task.model_copy(update={"constraint": read})


def _with_schema(rule: ConstraintSettings) -> ConstraintSettings:
    if rule.json_schema is not None and not rule.json_schema.lstrip().startswith("{"):
        path = Path(rule.json_schema).expanduser()
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = f"{rule.json_schema!r} can't be read: {error}; allowed: a JSON Schema, or a file that holds one"
            raise UserError(reason, field="task.constraint.json_schema") from None
        rule = rule.model_copy(update={"json_schema": json.dumps(content), "name": rule.name or path.stem})
    try:
        node_of(rule)
    except RowError as error:
        raise UserError(error.message.removeprefix("constraint: "), field="task.constraint") from None
    return rule


def as_planned(spec: JobSpec, recipe: RowRecipe, plan: Plan) -> RowRecipe:
    """The recipe with what its plan has found out: the date of a chat template, and the sampling settings of the checkpoint."""
    recipe = replace(recipe, task=with_chat_date(recipe.task, getattr(plan.spec.task, "chat_date", None)))
    if not spec.sampling.from_checkpoint:
        return recipe
    return with_sampling(
        spec, recipe, plan.spec.sampling.model_copy(update=spec.sampling.model_dump(exclude_unset=True))
    )


def with_sampling(spec: JobSpec, recipe: RowRecipe, found: Sampling | Path) -> RowRecipe:
    """The recipe with other sampling settings, or those of the model in a folder; UserError if they do not fit the spec."""
    from draftmill.decoders.backbones.checkpoint import GENERATION_FILE, read_generation

    try:
        if isinstance(found, Path):
            found = from_checkpoint(spec.sampling, read_generation(found), found / GENERATION_FILE)
        spec.model_copy(update={"sampling": found}).check_together()
    except ValueError as error:
        raise user_error(error, "sampling.from_checkpoint") from None
    return replace(recipe, sampling=found)


def with_examples(spec: JobSpec) -> Prompt:
    """The prompt with the rows of its examples in place of their file: workers need no file, and a plan has what was in it.

    These are the first k rows of the file, or k drawn by the seed, in JSON form; UserError if it has fewer, or if one can't be
    read.
    """
    examples = spec.prompt.examples
    if examples is None or examples.path is None:
        return spec.prompt
    assert examples.k is not None
    try:
        rows = chain.from_iterable(iterate(file) for file in list_inputs(spec.place(examples.path)))
        if examples.seed is None:
            chosen = list(islice(rows, examples.k))
        else:
            keyed = ((sample_key(examples.seed, str(number)), number, row) for number, row in enumerate(rows))
            chosen = [row for _, _, row in nsmallest(examples.k, keyed)]
    except UserError as error:
        raise UserError(error.message, field="prompt.examples.path") from None
    if len(chosen) < examples.k:
        raise UserError(
            f"{examples.k}, but {examples.path} has {counted(len(chosen), 'row')}", field="prompt.examples.k"
        )
    if bad := [row for row in chosen if row.error is not None]:
        reason = f"row {bad[0].row} of {examples.path} can't be read: {bad[0].error}"
        raise UserError(reason, field="prompt.examples.path")
    found = Examples(rows=tuple(plain(row.values or {}) for row in chosen), answer=examples.answer)
    return spec.prompt.model_copy(update={"examples": found})


def with_chat_date(task: Task, day: date | None) -> Task:
    """The task with the date that its chat template sees, unless it has one."""
    if isinstance(task, Infill) or task.chat_date is not None:
        return task
    return task.model_copy(update={"chat_date": day})


def sees_date(recipe: RowRecipe, tokenizer: Tokenizer | None, inputs: Sequence[InputFile]) -> bool:
    """Whether the rows are rendered with a chat template that may print the date."""
    if isinstance(recipe.task, Infill) or tokenizer is None or tokenizer.chat is None or not tokenizer.chat.has_date:
        return False
    return recipe.task.chat or begins_with_request(recipe, inputs)


def begins_with_request(recipe: RowRecipe, inputs: Sequence[InputFile]) -> bool:
    """Whether the first row is an OpenAI request; then the others are, too. No inputs are those of a run, which never are."""
    try:
        rows = (
            row
            for file in inputs[:1]
            for row in iterate(file, columns=read_columns(recipe), chunk_chars=recipe.chunk_chars)
        )
        return any(body_of(row.values or {}) is not None for row in islice(rows, 1))
    except UserError:  # a damaged file: planning says what is wrong
        return False


def run_state(place: Place, planned: dict[str, str] | None) -> dict[str, str]:
    """What identifies the rows of a finished run: its fingerprint, and a digest of its passes' manifests and its metrics.

    It is the `planned` one if the run has been deleted or pruned since: the rows were copied then. UserError if there is no
    finished run.
    """
    with about("input.run"):
        run = open_store(place)
        if planned is not None and next(run.list("data/"), None) is None:
            return planned
        plan = load_plan(run)
        if plan is None or not is_closed(run):
            what = "no run directory" if plan is None else "not finished; `draftmill run` resumes it"
            raise UserError(f"{place.url!r} is {what}", field="input.run")
        names = sorted(stat.name for folder in ("metrics/", "passes/") for stat in run.list(folder))
        manifests = [MANIFEST, *(name for name in names if name.endswith(f"/{MANIFEST}"))]
        hashes = [hashlib.sha256(run.get(name)).hexdigest() for name in manifests]
        return {"fingerprint": plan.fingerprint, "state": digest([hashes, [x for x in names if "metrics/" in x]])}


def copied_folder(files: Sequence[InputFile]) -> str:
    """The folder, in a job's run directory, with the rows of the run that is its input."""
    return "input/" + files[0].uri.rpartition("/input/")[2].rpartition("/")[0]


def copied_files(plan: Plan, store: Store) -> list[InputFile]:
    """The files there, wherever the run directory is now; those of the plan if `draftmill prune` has deleted them."""
    try:
        return list_inputs(store.place.below(copied_folder(plan.files)))
    except NothingThere:
        return list(plan.files)


def planned_files(inputs: Sequence[InputFile], planned: Sequence[InputFile]) -> list[InputFile]:
    """The inputs that a plan has, under its names and in its order; a later run takes the others. Skips missing ones."""
    by_uri, by_name = {file.uri: file for file in inputs}, {file.name: file for file in inputs}
    files = ((file.name, by_uri.get(file.uri) or by_name.get(file.name)) for file in planned)
    return [replace(file, name=name) for name, file in files if file is not None]


def _hash_model(folder: Path, display: Notes) -> str:
    total, done = weight_bytes(folder), 0

    def show_progress(count: int) -> None:
        nonlocal done
        if not done:
            display.note(f"hashing the model: {size_text(total)}")
        done += count
        display.step("hashing the model", done, total)

    return model_hash(folder, show_progress)


def day_of(spec: JobSpec) -> date:
    """The date of a new plan: the job's logical date, or today in UTC."""
    logical = spec.output.logical_date
    return today() if logical is None else read_date(logical).date()


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def open_model(spec: JobSpec) -> tuple[Path, ModelInfo, Tokenizer | None]:
    """Fetch and describe the model and load its tokenizer; checks that its family supports the task and the decoder."""
    from draftmill.decoders.backbones.checkpoint import check_split, inspect_model
    from draftmill.decoders.backbones.heads.files import check_heads

    model = spec.model
    folder = fetch_model(spec.place(model.path), model.revision, adapter=model.adapter)
    try:
        info = inspect_model(folder, family=model.family, mask_id=model.mask_id)
        check_task(spec.task.kind, info)
        decoder = with_baseline(spec, info).decoder
        check_model(decoder, info, spec.task.kind)
        if not isinstance(getattr(decoder, "drafter", None), DrafterPlace):  # else the head is the drafter's
            check_heads(decoder, folder)
        for shape in spec.shapes:
            check_split(info.family, folder, shape.gpus_per_model)
    except UserError:
        raise
    except ValueError as error:
        raise user_error(error, "model.path") from None
    return folder, info, load_tokenizer(folder, model.tokenizer, trust_remote_code=model.trust_remote_code)


def head_hash(spec: JobSpec) -> str | None:
    """SHA-256 of a draft head outside the model's folder; None if the spec names none."""
    head: Any = getattr(spec.decoder, "head", None)
    if head in {None, "auto", "none"}:
        return None
    folder = Path(head).expanduser()
    return hash_files(folder, [folder / name for name in ("draft_head.json", "draft_head.safetensors")])


# ---- checks of what will run against its model and tokenizer


def check_task(task: str, info: ModelInfo) -> None:
    """Raise UserError if no decoder for the model's family supports this kind of task."""
    from draftmill.decoders.backbones.families.table import FAMILIES

    kinds = {decoder.runs_on for decoder in DECODERS.values() if task in decoder.tasks}
    if info.kind not in kinds:
        families = sorted(name for name, family in FAMILIES.items() if family.kind in kinds)
        tasks = dict.fromkeys(
            name for decoder in DECODERS.values() if decoder.runs_on == info.kind for name in decoder.tasks
        )
        raise UserError(
            f"models of family {info.family!r} do not support {task!r}; tasks they support: "
            f"{', '.join(tasks) or 'none yet'}; families that support it: {', '.join(families) or 'none'}",
            field="task.kind",
        )


def check_recipe(recipe: RowRecipe, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
    """Raise UserError if the tokenizer has no chat template for a chat, if a stop string or an end token can never occur, or if
    sampling settings name tokens that the model does not have."""
    task = recipe.task
    if not isinstance(task, Infill) and task.chat and (tokenizer is None or tokenizer.chat is None):
        reason = "the tokenizer has no chat template (no file chat_template.jinja, and none in tokenizer_config.json)"
        raise UserError(f"{reason}; allowed: false", field="task.chat")
    if info.mask_id in recipe.ends:
        reason = (
            "is an end token of the model, and a mask is never generated; allowed: other ids, or task.ignore_eos: true"
        )
        raise UserError(f"{info.mask_id} {reason}", field="model.mask_id")
    if isinstance(task, Complete) and task.stop:
        problem = RowRules(recipe, tokenizer, info).unseen_stop(task.stop)
        if problem is not None:
            raise UserError(problem, field="task.stop")
    try:
        penalties_of(recipe.sampling, tokenizer, info.vocab_size, recipe.ends)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise UserError(problem, field=f"sampling.{key}") from None


def check_constraint(recipe: RowRecipe, tokenizer: Tokenizer | None, info: ModelInfo) -> tuple[str, ...]:
    """The size of each constraint's automaton, and the time to build it; UserError if no text of this model can match one."""
    task = recipe.task
    given = getattr(task, "constraint", None)
    if given is None or tokenizer is None:
        return ()
    rules = given.values() if isinstance(given, dict) else given if isinstance(given, tuple) else [given]
    maker, lines = ConstraintMaker(tokenizer, info, recipe.ends), list[str]()
    for rule in filter(None, rules):
        try:
            began_s = time.perf_counter()
            automaton = maker.compiled(rule)
            if isinstance(automaton, Automaton):
                took = f"compiled in {time.perf_counter() - began_s:.1f} s"
                lines.append(f"{rule.shown}: {automaton.num_states:,} states, {took}")
            if isinstance(task, Complete):
                problem = Constraint((automaton,), recipe.ends).problem([task.max_new_tokens])
                if problem:
                    raise UserError(problem, field="task.max_new_tokens")
        except RowError as error:
            raise UserError(error.message.removeprefix("constraint: "), field="task.constraint") from None
    return tuple(lines)


def length_note(task: Task, info: ModelInfo) -> str | None:
    """What to know of a completion's length: the model may take fewer tokens than the task asks for."""
    asked, most = getattr(task, "max_new_tokens", None), info.max_length
    if not isinstance(task, Complete) or most is None or asked is None or asked < most:
        return None
    return f"task.max_new_tokens is {asked:,}, but the model takes {most:,} tokens with the prompt: texts end there"


# ---- for the workers


def make_job(resolved: Resolved, plan: Plan) -> Job:
    """The Job for the workers; local paths become absolute, since workers may have another working directory.

    The inputs are those that this session found, whose content is the plan's: their location and date may have changed.
    """
    spec = resolved.spec
    here = {file.name: file for file in resolved.inputs}
    current = [here.get(file.name, file) for file in plan.files]
    return Job(
        store=plan.store.place.at(absolute(plan.store.url)),
        fingerprint=plan.fingerprint,
        code_version=plan.code_version,
        trace=spec.output.trace == "steps",
        model=spec.model_place(),
        recipe=resolved.recipe,
        bounds=spec.batching.bounds,
        unit_rows=max((size.rows for size in plan.sizes()), default=1),
        files=InputFiles(
            (replace(a, uri=b.uri, mtime_s=b.mtime_s) for a, b in zip(plan.files, current, strict=True)),
            spec.s3.options(),
        ),
        parts=parts_of(plan.parts),
        earlier=resolved.earlier,
        keep=plan.keep,
    )


def limits_of(spec: JobSpec) -> Limits:
    """The scheduler's limits, with the spec's settings."""
    stall_s, start_s = (max(getattr(shape, key) for shape in spec.shapes) for key in ("stall_s", "start_s"))
    return Limits(attempts=spec.errors.attempts, lease_s=stall_s, start_s=start_s)
