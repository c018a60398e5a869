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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from draftmill.actors.rows.text import Tokenizer
from draftmill.decoders.base import ModelInfo
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.log import print_result, shows_progress
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.eval.options import EvalOptions, require_lm_eval
from draftmill.jobs.eval.spec import EvalSpec, document, read_eval_spec
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.resolve import open_model
from draftmill.jobs.run.job import complete_job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.stores.store import Store, open_store

if TYPE_CHECKING:  # these import lm_eval (extra `lm-eval`), which takes some seconds
    from lm_eval.api.task import Task
    from lm_eval.loggers import EvaluationTracker

    from draftmill.jobs.eval.model import ChosenTasks, DraftmillLM

_log = logging.getLogger(__name__)

KEY: Final = "draftmill"
"""The key of a sample, and of the results, that holds what lm_eval does not know."""

TOTALS: Final = ("new_tokens", "nfe", "nfe_draft", "proposed", "accepted", "device_s")

SEED_NAMES: Final = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
SAME_NAMES: Final = (
    "num_fewshot", "limit", "samples", "bootstrap_iters", "write_out", "system_instruction", "apply_chat_template",
    "predict_only", "confirm_run_unsafe_code",
)  # fmt: skip
"""Arguments of lm_eval's simple_evaluate that our options have under the same name."""


def evaluate(path: str, overrides: list[str], options: EvalOptions, run_options: RunOptions) -> int:
    """Evaluate, or resume an evaluation; returns 0. UserError if the spec or a task is unusable; Ended as of a job."""
    spec = read_eval_spec(path, overrides)
    require_lm_eval()
    if not shows_progress():
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm_eval's own progress
    info, tokenizer = _load_model(spec, options)
    from draftmill.jobs.eval.model import DraftmillLM, load_tasks

    tasks = load_tasks(options, Display().note)
    with ExitStack() as stack:
        run = _runner(run_options, stack)
        asker = DraftmillLM(spec, info, tokenizer, run, tasks=tasks.tasks, chosen=options.samples or {})
        asker.check(options)
        _evaluate(spec, options, asker, tasks)
    return OK


def _load_model(spec: EvalSpec, options: EvalOptions) -> tuple[ModelInfo, Tokenizer]:
    _, info, tokenizer = open_model(spec.any_job())
    if tokenizer is None:
        raise UserError("'none', but tasks are made of text; allowed: auto, or a folder", field="model.tokenizer")
    if options.apply_chat_template and tokenizer.chat is None:
        raise UserError("the tokenizer has no chat template", field="--apply_chat_template")
    return info, tokenizer


def _runner(options: RunOptions, stack: ExitStack) -> Callable[[JobSpec], object]:
    """Runs jobs one after another; a Ray of our own starts before the first one that has work, and stays up."""
    is_up = options.local

    def run(job: JobSpec) -> None:
        nonlocal is_up
        if not is_up and not is_closed(open_store(job.place(job.output.path))):
            stack.enter_context(ray_session(options.ray_address, note=Display().note))
            is_up = True
        with redirect_stdout(sys.stderr):  # standard output is for lm_eval's table
            complete_job(job, options)

    return run


def _evaluate(spec: EvalSpec, options: EvalOptions, asker: DraftmillLM, tasks: ChosenTasks) -> None:
    """Let lm_eval ask for all answers, and write and print its results with what the answers cost."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    tracker, chosen, name_of_model = EvaluationTracker(), options.samples or {}, spec.any_job().model.path
    results: dict[str, Any] = simple_evaluate(
        model=asker,
        model_args={"pretrained": name_of_model, "decoder": spec.decoder},
        tasks=list(tasks.tasks),
        task_manager=tasks,
        log_samples=True,
        evaluation_tracker=tracker,
        gen_kwargs=options.gen_kwargs or None,
        fewshot_as_multiturn=options.multiturn,
        **dict(zip(SEED_NAMES, options.seeds, strict=True)),
        **{name: getattr(options, name) for name in SAME_NAMES},
    )
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
    file = _save(tracker, results, samples, store)
    print_result(
        f"draftmill ({name_of_model}, {spec.decoder}), gen_kwargs: ({options.gen_kwargs or None}), "
        f"limit: {options.limit}, num_fewshot: {options.num_fewshot}"
    )
    _print_results(results, answers)
    print_result(f"{store.url}/{file}")
    store.tidy()


def _print_results(results: dict[str, Any], answers: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print lm_eval's tables of tasks and of groups, what each task cost, and the first few failed answers."""
    from lm_eval.utils import make_table

    print_result(make_table(results))
    if "groups" in results:
        print_result(make_table(results, "groups"))
    for name, sums in results[KEY].items():
        print_result(_line_of(name, sums))
    failed = [answer for of_task in answers.values() for answer in of_task if answer["status"] != "ok"]
    for answer in failed[:3]:
        _log.warning(f"failed: {answer['id']}: {answer.get('error')}")


def facts_of(
    task: Task, notes: Mapping[int, list[dict[str, Any]]], chosen: Mapping[str, list[int]]
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
    answers = f"{counted(sums['answers'], 'answer')} from {counted(sums['rows'], 'row')}"
    parts = [answers, counted(tokens, "token"), counted(nfe, "forward")]
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
) -> str:
    """Write the files with lm_eval's own code and put them into the evaluation's directory; returns the name of the results."""
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
        return names[-1]
