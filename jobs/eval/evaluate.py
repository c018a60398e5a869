"""`draftmill eval`: lm-evaluation-harness's tasks with a spec's model and decoder, as jobs that resume.

    spec, options -> model, tasks -> requests of all tasks -> a job for each kind and setting -> answers -> lm_eval's scores

Everything that can be refused is refused before the first job: the spec, unknown tasks, data sets that can't be had, and
requests that the model's family or the spec's decoder can't do.

    EVAL/MODEL/results_2026-11-22T14-00-00.json             lm_eval's scores, and what the answers cost
    EVAL/MODEL/samples_TASK_2026-11-22T14-00-00.jsonl       each sample with the facts of its answers

lm_eval's own code writes both files.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.rows.text import load_tokenizer
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.log import print_result, shows_progress
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.eval.options import EvalOptions
from draftmill.jobs.eval.runs import EvalRuns, Unfinished, document
from draftmill.jobs.eval.spec import EvalSpec, read_eval_spec
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.plan.resolve import inspect
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.store import open_store, tidy

if TYPE_CHECKING:  # these import lm_eval (extra `lm-eval`), which takes some seconds
    from lm_eval.api.task import Task
    from lm_eval.loggers import EvaluationTracker

    from draftmill.jobs.eval.model import CheckpointFacts, ChosenTasks, DraftmillLM

_log = logging.getLogger(__name__)

KEY: Final = "draftmill"
"""The key of a sample, and of the results, that holds what lm_eval does not know."""

TOTALS: Final = ("new_tokens", "nfe", "nfe_draft", "proposed", "accepted", "device_s")


def evaluate(path: str, overrides: list[str], options: EvalOptions, run_options: RunOptions) -> int:
    """Evaluate, or resume an evaluation; returns the exit code. Raises UserError if the spec or a task is unusable."""
    spec = read_eval_spec(path, overrides)
    if find_spec("lm_eval") is None:
        raise UserError("draftmill eval needs lm-evaluation-harness: pip install 'draftmill[lm-eval]'")
    if not shows_progress():
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm_eval's own progress
    model = _load_model(spec, options)
    from draftmill.jobs.eval.model import TaskFinder, check_tasks

    tasks = TaskFinder(options, Display().note).load()
    check_tasks(tasks.tasks, spec, model.info, options)
    with ExitStack() as stack:
        try:
            return _evaluate(spec, options, model, tasks, EvalRuns(spec, _runner(run_options, stack)))
        except Unfinished as error:
            return error.code


def _load_model(spec: EvalSpec, options: EvalOptions) -> CheckpointFacts:
    from draftmill.jobs.eval.model import CheckpointFacts

    job = spec.any_job()
    folder = fetch_model(job.place(job.model.path), job.model.revision, adapter=job.model.adapter)
    info = inspect(job, folder)
    tokenizer = load_tokenizer(folder, job.model.tokenizer, trust_remote_code=job.model.trust_remote_code)
    if tokenizer is None:
        raise UserError("'none', but tasks are made of text; allowed: auto, or a folder", field="model.tokenizer")
    if options.apply_chat_template and tokenizer.chat is None:
        raise UserError("the tokenizer has no chat template", field="--apply_chat_template")
    return CheckpointFacts(job.model.path, info, tokenizer)


def _runner(options: RunOptions, stack: ExitStack) -> Callable[[JobSpec], int]:
    """Runs jobs one after another; a Ray of our own starts before the first one that has work, and stays up."""
    is_up = options.local

    def run(job: JobSpec) -> int:
        nonlocal is_up
        if not is_up and not is_closed(open_store(job.place(job.output.path))):
            stack.enter_context(ray_session(options.ray_address, note=Display().note))
            is_up = True
        with redirect_stdout(sys.stderr):  # standard output is for lm_eval's table
            return run_job(job, options)

    return run


def _evaluate(spec: EvalSpec, options: EvalOptions, model: CheckpointFacts, tasks: ChosenTasks, runs: EvalRuns) -> int:
    from lm_eval.loggers import EvaluationTracker

    from draftmill.jobs.eval.model import DraftmillLM

    chosen = options.samples or {}
    asker = DraftmillLM(spec, model, runs, chosen=chosen, check=lambda: _check_requests(spec, model, tasks, asker))
    tracker = EvaluationTracker()
    results = _ask(asker, spec, options, model, tasks, tracker)
    samples = results.pop("samples")
    facts = {name: facts_of(task, asker.notes, chosen) for name, task in tasks.tasks.items()}
    for name, of_task in samples.items():  # `draftmill[i][k]` belongs to `resps[i][k]`
        for sample in of_task:
            sample[KEY] = facts[name][sample["doc_id"]]
    answers = {
        name: [answer for requests in of_task.values() for repeats in requests for answer in repeats]
        for name, of_task in facts.items()
    }
    results[KEY] = {name: totals(of_task) for name, of_task in answers.items()}
    store = open_store(spec.any_job().place(spec.any_job().output.path))
    names = _save(tracker, results, samples, store)
    _print_results(spec, options, model, results, answers)
    print_result(f"{store.url}/{next(name for name in names if '/results_' in name)}")
    tidy(store)
    return OK


def _check_requests(spec: EvalSpec, model: CheckpointFacts, tasks: ChosenTasks, asker: DraftmillLM) -> None:
    """Raise UserError for a request that the model or the decoder can't do, once the tasks have built their requests."""
    from draftmill.jobs.eval.model import check_requests

    check_requests(tasks.tasks, spec, model.info)
    requests = [request for task in tasks.tasks.values() for request in task.instances]
    prompts = [request for request in requests if request.request_type == "generate_until"]
    for generation in {asker.generation(prompt.task_name, prompt.args[1]) for prompt in prompts}:
        asker.job_for(generation)("requests.jsonl", spec.any_job().output.path)


def _ask(
    asker: DraftmillLM,
    spec: EvalSpec,
    options: EvalOptions,
    model: CheckpointFacts,
    tasks: ChosenTasks,
    tracker: EvaluationTracker,
) -> dict[str, Any]:
    """lm-evaluation-harness's own loop over the tasks: its results with the samples."""
    from lm_eval import simple_evaluate

    results: dict[str, Any] = simple_evaluate(
        model=asker,
        model_args={"pretrained": model.name, "decoder": spec.decoder},
        tasks=list(tasks.tasks),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        samples=options.samples,
        bootstrap_iters=options.bootstrap_iters,
        write_out=options.write_out,
        log_samples=True,
        evaluation_tracker=tracker,
        system_instruction=options.system_instruction,
        apply_chat_template=options.apply_chat_template,
        fewshot_as_multiturn=options.multiturn,
        gen_kwargs=options.gen_kwargs or None,
        task_manager=tasks,
        predict_only=options.predict_only,
        random_seed=options.seeds[0],
        numpy_random_seed=options.seeds[1],
        torch_random_seed=options.seeds[2],
        fewshot_random_seed=options.seeds[3],
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )
    return results


def _print_results(
    spec: EvalSpec,
    options: EvalOptions,
    model: CheckpointFacts,
    results: dict[str, Any],
    answers: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    """Print lm_eval's tables of tasks and of groups, what each task cost, and the first few failed answers."""
    from lm_eval.utils import make_table

    print_result(
        f"draftmill ({model.name}, {spec.decoder}), gen_kwargs: ({options.gen_kwargs or None}), limit: {options.limit}, "
        f"num_fewshot: {options.num_fewshot}"
    )
    print_result(make_table(results))
    if "groups" in results:
        print_result(make_table(results, "groups"))
    for name, sums in results[KEY].items():
        print_result(_line_of(name, sums))
    failed = [answer for of_task in answers.values() for answer in of_task if answer["status"] != "ok"]
    for answer in failed[:3]:
        _log.warning(f"failed: {answer['id']}: {answer.get('error')}")


def facts_of(
    task: Task, notes: Mapping[int, list[dict[str, Any]]], chosen: dict[str, list[int]]
) -> dict[int, list[list[dict[str, Any]]]]:
    """The facts of a task's answers by document: for each request of it, in lm_eval's order, those of each repeat."""
    facts = defaultdict(list)
    for request in sorted(task.instances, key=lambda request: request.idx):
        facts[document(request, chosen)].append(notes.get(id(request), []))
    return dict(facts)


def totals(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the rows of a task's answers; a row that answers several requests counts once."""
    rows = list({(answer["run_dir"], answer["id"]): answer for answer in answers}.values())
    sums = {key: sum(row[key] for row in rows if key in row) for key in TOTALS if any(key in row for row in rows)}
    return {
        "answers": len(answers),
        "rows": len(rows),
        "failed": sum(answer["status"] != "ok" for answer in answers),
        "run_dirs": sorted({row["run_dir"] for row in rows}),
        **sums,
    }


def _line_of(name: str, sums: Mapping[str, Any]) -> str:
    tokens, nfe = sums.get("new_tokens", 0), sums.get("nfe", 0)
    parts = [f"{sums['answers']:,} answers from {sums['rows']:,} rows", f"{tokens:,} tokens", f"{nfe:,} forwards"]
    if tokens:
        parts.append(f"{nfe / tokens:.2f} per token")
    if sums.get("proposed"):
        parts.append(f"{sums['accepted'] / sums['proposed']:.0%} of {sums['proposed']:,} drafts accepted")
    if "device_s" in sums:
        parts.append(f"{sums['device_s']:,.1f} s of forwards")
    if sums["failed"]:
        parts.append(f"{sums['failed']:,} answers failed and count as empty")
    return f"{name}: {', '.join(parts)}"


def _save(
    tracker: EvaluationTracker, results: dict[str, Any], samples: Mapping[str, list[dict[str, Any]]], store: Store
) -> list[str]:
    """Write the files with lm_eval's own code and put them into the evaluation's directory; returns their names."""
    with tempfile.TemporaryDirectory(prefix="draftmill-eval-") as folder:
        tracker.output_path = folder
        tracker.save_results_aggregated(results=results, samples=dict(samples))
        for name, of_task in samples.items():
            tracker.save_results_samples(task_name=name, samples=of_task)
        # The results come last, so that samples without results are those of an interrupted evaluation.
        files = sorted((path for path in Path(folder).rglob("*") if path.is_file()), reverse=True)
        if len(files) != 1 + len(samples):  # lm_eval only logs what it could not write
            raise StoreError(f"lm_eval wrote {len(files)} of {1 + len(samples)} files of results; see its warnings")
        names = [path.relative_to(folder).as_posix() for path in files]
        for name, file in zip(names, files, strict=True):
            store.put(name, file.read_bytes())
        return names
