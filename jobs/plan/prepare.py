"""Loads and checks, before anything is written, all that a spec refers to: model, tokenizer, inputs and an existing plan.

Every problem that a user can cause raises a UserError here, with the field's path.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
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
from draftmill.actors.loop.loading import check_drafter, fetch_drafter
from draftmill.actors.rows.constraints import ConstraintMaker, node_of
from draftmill.actors.rows.fim import fills_in_middle, template_of
from draftmill.actors.rows.penalties import penalties_of
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.requests import body_of
from draftmill.actors.rows.row_settings import RowRules
from draftmill.actors.rows.stop_text import end_ids
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.actors.task import Complete, ConstraintSettings, Examples, Infill, Task, today
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.settings import DECODERS, check_model
from draftmill.jobs.config.dates import read_date
from draftmill.jobs.config.rules import sampling_problem
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.formatting import Notes, counted, size_text
from draftmill.jobs.plan.fingerprint import Hashes, digest, results_key
from draftmill.jobs.plan.plan import (
    Plan,
    Sift,
    Survey,
    build_plan,
    compare_inputs,
    compare_plan,
    compare_settings,
    load_plan,
    survey,
)
from draftmill.jobs.plan.worker_job import place_of
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import NothingThere, list_inputs
from draftmill.storage.inputs.kept import plain
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import num_bytes_to_hash, with_hashes, with_known_hashes
from draftmill.storage.json_text import parse_json
from draftmill.storage.runs.commit import MANIFEST, is_closed
from draftmill.storage.runs.unit_table import PLAN
from draftmill.storage.stores.interface import Place, Store, about
from draftmill.storage.stores.store import open_store

HEAD_FIELD = "decoder.head"
ROWS_PER_NOTE = 1_000_000

NOTED_BYTES = 2**30
"""Hashing more input than this, which takes a second or two, prints a note."""

LIMITED_HASH_BYTES = 2**30
"""With `input.limit`, a job may read few rows of a huge file: files larger than this are identified by size and date alone."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A spec whose model and inputs are usable. `plan` is the run directory's plan of the same job, or None; `constraints`
    describes the automata of the task.

    A new job whose input is a run has no inputs yet: jobs/results/run_input.py makes them.
    """

    spec: JobSpec
    folder: Path
    info: ModelInfo
    tokenizer: Tokenizer | None
    hashes: Hashes
    inputs: list[InputFile]
    plan: Plan | None
    constraints: tuple[str, ...] = ()


def prepare(spec: JobSpec, store: Store, display: Notes | None = None, *, loaders: Loaders | None = None) -> Prepared:
    """Check the run directory, the model and the inputs; raises UserError if one of them is unusable.

    Compares settings with an existing plan first, before it fetches or hashes weights, which may take long. `loaders` are for
    jobs that have something in common.
    """
    loaders = loaders or Loaders()
    spec = with_examples(with_schemas(spec))
    plan, asked = load_plan(store), spec.sampling
    if plan is not None:
        spec = as_planned(spec, plan)
        compare_settings(plan, spec)
    model = spec.model
    folder = fetch_model(spec.place(model.path), model.revision, adapter=model.adapter)
    info = inspect(spec, folder)
    if asked.from_checkpoint:
        spec = with_sampling(spec, recommended(asked, folder))
    tokenizer = loaders.tokenizer(folder, spec.model.tokenizer, trust_remote_code=spec.model.trust_remote_code)
    check_chat(spec, tokenizer)
    planned = None if plan is None else plan.results["input"].get("run")
    run = None if spec.input.run is None else run_state(spec.place(spec.input.run), planned)
    if run is None:
        inputs = loaders.inputs(*spec.input_places, delimiter=spec.input.delimiter)
    elif plan is not None:
        inputs = copied_files(plan, store)
    else:
        inputs = []
    if plan is not None:
        if spec.input.since is not None:
            inputs = planned_files(inputs, plan.files)
        inputs = with_known_hashes(inputs, {file.name: file for file in plan.files})
        compare_inputs(plan, inputs)
    if plan is None and sees_date(spec, tokenizer, inputs):
        spec = with_chat_date(spec, loaders.day(spec))
    hashes = Hashes(
        model=_hash_model(folder, display or Notes()),
        adapter=adapter_hash(folder),
        tokenizer=tokenizer_hash(folder, spec.model.tokenizer),
        head=head_hash(spec),
        drafter=drafter_hash(spec, folder, info, tokenizer),
        begin=None if tokenizer is None else tokenizer.bos_id,
        ends=end_ids(spec.task, folder, tokenizer, info),
        fim=fim_key(spec.task, tokenizer, info),
        run=run,
    )
    for check in (check_stop, check_penalties):
        check(spec, tokenizer, info, hashes.ends)
    constraints = check_constraint(spec, tokenizer, info, hashes.ends)
    if plan is not None:
        compare_plan(plan, spec, results_key(spec, info, hashes, inputs), inputs)
    elif next(store.list("data/"), None) is not None:
        raise UserError(f"{store.url} has results but no {PLAN}; use another directory", field="output.path")
    return Prepared(spec, folder, info, tokenizer, hashes, inputs, plan, constraints)


def with_schemas(spec: JobSpec) -> JobSpec:
    """The spec with the contents of the files that hold JSON Schemas; UserError with every keyword that can't be kept."""
    given = getattr(spec.task, "constraint", None)
    if given is None:
        return spec
    if isinstance(given, dict):
        read: Any = {name: _with_schema(rule) for name, rule in given.items()}
    else:
        read = tuple(map(_with_schema, given)) if isinstance(given, tuple) else _with_schema(given)
    return spec.model_copy(update={"task": spec.task.model_copy(update={"constraint": read})})


def _with_schema(rule: ConstraintSettings | None) -> ConstraintSettings | None:
    if rule is None:
        return None
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


def check_constraint(
    spec: JobSpec, tokenizer: Tokenizer | None, info: ModelInfo, ends: Sequence[int]
) -> tuple[str, ...]:
    """The size of each constraint's automaton, and the time to build it; UserError if no text of this model can match one."""
    given = getattr(spec.task, "constraint", None)
    if given is None or tokenizer is None:
        return ()
    rules = given.values() if isinstance(given, dict) else given if isinstance(given, tuple) else [given]
    maker, lines = ConstraintMaker(tokenizer, info, ends), list[str]()
    for rule in rules:
        try:
            began_s = time.perf_counter()
            automaton = None if rule is None else maker.compiled(rule)
            if rule is not None and isinstance(automaton, Automaton):
                took = f"compiled in {time.perf_counter() - began_s:.1f} s"
                lines.append(f"{rule.shown}: {automaton.num_states:,} states, {took}")
            if isinstance(spec.task, Complete) and automaton is not None:
                problem = Constraint((automaton,), tuple(ends)).problem([spec.task.max_new_tokens])
                if problem:
                    raise UserError(problem, field="task.max_new_tokens")
        except RowError as error:
            raise UserError(error.message.removeprefix("constraint: "), field="task.constraint") from None
    return tuple(lines)


def as_planned(spec: JobSpec, plan: Plan) -> JobSpec:
    """The spec with what its plan has found out: the date of a chat template, and the sampling settings of the checkpoint."""
    spec = with_chat_date(spec, getattr(plan.spec.task, "chat_date", None))
    if not spec.sampling.from_checkpoint:
        return spec
    own = spec.sampling.model_dump(exclude_unset=True)
    return with_sampling(spec, plan.spec.sampling.model_copy(update=own))


def with_sampling(spec: JobSpec, sampling: Sampling) -> JobSpec:
    """The spec with other sampling settings; UserError if they do not fit it."""
    try:
        spec.decoder.check_sampling(sampling)
        problem = sampling_problem(
            spec.task, sampling, spec.input.columns, has_tokenizer=spec.model.tokenizer != "none"
        )
        if problem is not None:
            raise ValueError(problem)
    except ValueError as error:
        raise user_error(error, "sampling.from_checkpoint") from None
    return spec.model_copy(update={"sampling": sampling})


def recommended(sampling: Sampling, folder: Path) -> Sampling:
    """The settings with those of the model's generation_config.json for the keys that are left out."""
    from draftmill.decoders.backbones.checkpoint import GENERATION_FILE, read_generation

    try:
        return from_checkpoint(sampling, read_generation(folder), folder / GENERATION_FILE)
    except ValueError as error:
        raise UserError(str(error), field="sampling.from_checkpoint") from None


def with_examples(spec: JobSpec) -> JobSpec:
    """The spec with the rows of its examples in place of their file: workers need no file, and a plan has what was in it."""
    examples = spec.prompt.examples
    if examples is None or examples.path is None:
        return spec
    chosen = Examples(rows=tuple(read_examples(examples, spec.place(examples.path))), answer=examples.answer)
    return spec.model_copy(update={"prompt": spec.prompt.model_copy(update={"examples": chosen})})


def read_examples(examples: Examples, place: Place) -> list[dict[str, Any]]:
    """The first k rows of the file, or k drawn by the seed, in JSON form; UserError if it has fewer, or if one can't be read."""
    assert examples.path is not None and examples.k is not None
    try:
        rows = chain.from_iterable(iterate(file) for file in list_inputs(place))
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
    return [plain(row.values or {}) for row in chosen]


def with_chat_date(spec: JobSpec, day: date | None) -> JobSpec:
    """The spec with the date that its chat template sees, unless it has one."""
    if isinstance(spec.task, Infill) or spec.task.chat_date is not None:
        return spec
    return spec.model_copy(update={"task": spec.task.model_copy(update={"chat_date": day})})


def day_of(spec: JobSpec) -> date:
    """The date of a new plan: the job's logical date, or today in UTC."""
    logical = spec.output.logical_date
    return today() if logical is None else read_date(logical).date()


def sees_date(spec: JobSpec, tokenizer: Tokenizer | None, inputs: Sequence[InputFile]) -> bool:
    """Whether the rows are rendered with a chat template that may print the date."""
    if isinstance(spec.task, Infill) or tokenizer is None or tokenizer.chat is None or not tokenizer.chat.has_date:
        return False
    return spec.task.chat or begins_with_request(spec, inputs)


def begins_with_request(spec: JobSpec, inputs: Sequence[InputFile]) -> bool:
    """Whether the first row is an OpenAI request; then the others are, too. Rows of a run never are."""
    if spec.input.run is not None:
        return False
    columns = read_columns(spec.recipe())
    try:
        rows = iterate(inputs[0], columns=columns, chunk_chars=spec.input.chunk_chars)
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


@dataclass(frozen=True, slots=True)
class Loaders:
    """How `prepare` gets what jobs may have in common; `remembering` gets each of these only once."""

    tokenizer: Callable[..., Tokenizer | None] = load_tokenizer
    inputs: Callable[..., list[InputFile]] = list_inputs
    day: Callable[[JobSpec], date] = day_of


def remembering() -> Loaders:
    """Loaders for jobs that are prepared one after another and may have the same models, tokenizers and inputs."""
    now = today()  # jobs that are compared with each other have one date, also around midnight
    return Loaders(cache(load_tokenizer), cache(list_inputs), lambda spec: now)


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def inspect(spec: JobSpec, folder: Path) -> ModelInfo:
    """Describe the checkpoint; checks that its family supports the task and the decoder."""
    from draftmill.decoders.backbones.checkpoint import check_split, inspect_model

    try:
        info = inspect_model(folder, family=spec.model.family, mask_id=spec.model.mask_id)
        check_task(spec.task, info)
        check_model(spec.decoder, info, spec.task.kind)
        for shape in spec.shapes:
            check_split(info.family, folder, shape.gpus_per_model)
    except UserError:
        raise
    except ValueError as error:
        raise user_error(error, "model.path") from None
    return info


def check_task(task: Task, info: ModelInfo) -> None:
    """Raise UserError if no decoder for the model's family supports the task."""
    from draftmill.decoders.backbones.families.table import FAMILIES

    kinds = {decoder.runs_on for decoder in DECODERS.values() if task.kind in decoder.tasks}
    if info.kind not in kinds:
        families = sorted(name for name, family in FAMILIES.items() if family.kind in kinds)
        tasks = dict.fromkeys(
            name for decoder in DECODERS.values() if decoder.runs_on == info.kind for name in decoder.tasks
        )
        raise UserError(
            f"models of family {info.family!r} do not support {task.kind!r}; tasks they support: "
            f"{', '.join(tasks) or 'none yet'}; families that support it: {', '.join(families) or 'none'}",
            field="task.kind",
        )


def length_note(task: Task, info: ModelInfo) -> str | None:
    """What to know of a completion's length: the model may take fewer tokens than the task asks for."""
    asked, most = getattr(task, "max_new_tokens", None), info.max_length
    if not isinstance(task, Complete) or most is None or asked is None or asked < most:
        return None
    return f"task.max_new_tokens is {asked:,}, but the model takes {most:,} tokens with the prompt: texts end there"


def check_chat(spec: JobSpec, tokenizer: Tokenizer | None) -> None:
    """Raise UserError if the task is a chat and the tokenizer has no chat template."""
    if not isinstance(spec.task, Infill) and spec.task.chat and (tokenizer is None or tokenizer.chat is None):
        reason = "the tokenizer has no chat template (no file chat_template.jinja, and none in tokenizer_config.json)"
        raise UserError(f"{reason}; allowed: false", field="task.chat")


def fim_key(task: Task, tokenizer: Tokenizer | None, info: ModelInfo) -> dict[str, Any] | None:
    """The special tokens for filling in the middle; None if the task doesn't need them, UserError if the model has none."""
    if not isinstance(task, Infill) or not fills_in_middle(task, info):
        return None
    return template_of(task.fim, tokenizer, info).key()


def check_stop(spec: JobSpec, tokenizer: Tokenizer | None, info: ModelInfo, ends: tuple[int, ...]) -> None:
    """Raise UserError if a stop string of the task can never occur."""
    if isinstance(spec.task, Complete) and spec.task.stop:
        rules = RowRules(spec.task, spec.input.columns, spec.decoder.kind, spec.sampling, tokenizer, ends)
        problem = rules.unseen_stop(spec.task.stop)
        if problem is not None:
            raise UserError(problem, field="task.stop")


def check_penalties(spec: JobSpec, tokenizer: Tokenizer | None, info: ModelInfo, ends: tuple[int, ...]) -> None:
    """Raise UserError if sampling settings name tokens that the model does not have."""
    try:
        penalties_of(spec.sampling, tokenizer, vocab_size=info.vocab_size, ends=ends)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise UserError(problem, field=f"sampling.{key}") from None


def drafter_hash(spec: JobSpec, folder: Path, info: ModelInfo, tokenizer: Tokenizer | None) -> str | None:
    """SHA-256 of the drafter model, None without one; UserError if it can't be fetched or does not fit the model."""
    drafter = fetch_drafter(spec.decoder, spec.s3.options())
    if drafter is None:
        return None
    return check_drafter(drafter, folder, info, tokenizer, place_of(spec), decoder=spec.decoder)


def head_hash(spec: JobSpec) -> str | None:
    """SHA-256 of a draft head outside the model's folder; None if the spec names none."""
    head: Any = getattr(spec.decoder, "head", None)
    if head in {None, "auto", "none"}:
        return None
    folder = Path(head).expanduser()
    files = [folder / name for name in ("draft_head.json", "draft_head.safetensors")]
    if not all(file.is_file() for file in files):
        raise UserError(
            f"{head!r} lacks draft_head.json or draft_head.safetensors; allowed: auto, none, or a folder that has both",
            field=HEAD_FIELD,
        )
    return hash_files(folder, files)


def make_plan(
    prepared: Prepared,
    store: Store,
    display: Notes,
    *,
    epoch: int = 0,
    sift: Sift | None = None,
    survey: Survey = survey,
) -> Plan:
    """Read and measure every row of the inputs and write the plan; call it only under the lease, whose epoch is `epoch`.

    `survey` reads the rows: in this process, or by tasks of a cluster (Backend.survey). `sift` leaves rows out (see
    build_plan). If another driver has planned since `prepare`, its plan is compared and returned.
    """
    plan = load_plan(store)
    if plan is not None:
        inputs = with_known_hashes(prepared.inputs, {file.name: file for file in plan.files})
        compare_plan(plan, prepared.spec, results_key(prepared.spec, prepared.info, prepared.hashes, inputs), inputs)
        return plan
    size = size_text(sum(file.size or 0 for file in prepared.inputs))
    if note := length_note(prepared.spec.task, prepared.info):
        display.note(note)
    display.note(f"planning: reading {counted(len(prepared.inputs), 'input file')}, {size}")
    most_bytes = None if prepared.spec.input.limit is None else LIMITED_HASH_BYTES
    num_bytes = num_bytes_to_hash(prepared.inputs, most_bytes)
    if num_bytes >= NOTED_BYTES:
        display.note(f"planning: hashing {num_bytes / 1e9:,.1f} GB of input, so that a resume can detect changes")
    inputs = with_hashes(prepared.inputs, most_bytes=most_bytes)
    rows = said = 0

    def progress(count: int) -> None:
        nonlocal rows, said
        rows += count
        if rows - said >= ROWS_PER_NOTE:
            said = rows
            display.note(f"planning: {rows:,} rows")

    plan = build_plan(
        prepared.spec,
        prepared.info,
        prepared.tokenizer,
        prepared.hashes,
        inputs,
        store,
        epoch=epoch,
        progress=progress,
        sift=sift,
        survey=survey,
    )
    display.note(
        f"planned: {counted(plan.rows, 'sample')}, {plan.holes:,} tokens {prepared.spec.task.goal}, {counted(plan.units, 'unit')}"
    )
    return plan
