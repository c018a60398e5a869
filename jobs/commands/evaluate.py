"""`draftmill eval`: lm-evaluation-harness's tasks with a spec's model and decoder, as jobs that resume.

    spec, options -> model, tasks -> requests of all tasks -> a job for each kind and setting -> answers -> lm_eval's scores

Everything that can be refused is refused before the first job: the spec, unknown tasks, data sets that can't be had, and
requests that the model's family or the spec's decoder can't do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from typing import Any, Final

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.rows.text import load_tokenizer
from draftmill.jobs.driving.ray_session import ray_session
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.harness.options import EvalOptions
from draftmill.jobs.harness.runs import Runs, Unfinished
from draftmill.jobs.harness.spec import EvalSpec, read_eval_spec
from draftmill.jobs.plan.prepare import inspect
from draftmill.jobs.running.run import run_job
from draftmill.jobs.running.session import RunOptions
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import UserError
from draftmill.storage.runs.commit import is_closed
from draftmill.storage.stores.store import open_store, tidy

EXTRA: Final = "lm-eval"


def evaluate(path: str, overrides: list[str], options: EvalOptions, how: RunOptions) -> int:
    """Evaluate, or resume an evaluation; returns the exit code. Raises UserError if the spec or a task is unusable."""
    spec = read_eval_spec(path, overrides)
    if find_spec("lm_eval") is None:
        raise UserError(f"draftmill eval needs lm-evaluation-harness: pip install 'draftmill[{EXTRA}]'")
    if how.quiet:
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm_eval's own progress
    model = _model(spec, options)
    # These modules import lm_eval.
    from draftmill.jobs.harness.tasks import Finder, check_tasks

    manager = Finder(options, _unsaid if how.quiet else _said).load()
    check_tasks(manager.tasks, spec, model.info, options)
    with ExitStack() as stack:
        runs = Runs(spec, _runner(how, stack))
        try:
            return _evaluated(spec, options, model, manager, runs)
        except Unfinished as error:
            return error.code


def _model(spec: EvalSpec, options: EvalOptions) -> Any:
    """The checkpoint's facts and its tokenizer."""
    from draftmill.jobs.harness.model import Model

    job = spec.any_job()
    folder = fetch_model(job.model.path, job.model.revision, adapter=job.model.adapter, s3=job.s3.options())
    info = inspect(job, folder)
    tokenizer = load_tokenizer(folder, job.model.tokenizer, trust_remote_code=job.model.trust_remote_code)
    if tokenizer is None:
        raise UserError("'none', but tasks are made of text; allowed: auto, or a folder", field="model.tokenizer")
    if options.apply_chat_template and tokenizer.chat is None:
        raise UserError("the tokenizer has no chat template", field="--apply_chat_template")
    return Model(job.model.path, info, tokenizer)


def _runner(how: RunOptions, stack: ExitStack) -> Callable[[JobSpec], int]:
    """Runs jobs one after another; a Ray of our own starts before the first one that has work, and stays up."""
    is_up = how.local

    def run(job: JobSpec) -> int:
        nonlocal is_up
        if not is_up and not is_closed(open_store(job.output.path, s3=job.s3.options())):
            stack.enter_context(ray_session(how.ray_address, note=_unsaid if how.quiet else _said))
            is_up = True
        with redirect_stdout(sys.stderr):  # standard output is for lm_eval's table
            return run_job(job, how)

    return run


def _said(message: str) -> None:
    print(message, file=sys.stderr)


def _unsaid(message: str) -> None:
    return None


def _evaluated(spec: EvalSpec, options: EvalOptions, model: Any, manager: Any, runs: Runs) -> int:
    from lm_eval.loggers import EvaluationTracker

    from draftmill.jobs.harness.model import Draftmill
    from draftmill.jobs.harness.results import join, save, totals

    chosen = options.samples or {}
    asker = Draftmill(spec, model, runs, chosen=chosen, check=lambda: _check_requests(spec, model, manager, asker))
    tracker = EvaluationTracker()
    results = _asked(asker, spec, options, model, manager, tracker)
    samples = results.pop("samples")
    join(manager.tasks, samples, asker.notes, chosen)
    results["draftmill"] = totals(manager.tasks, asker.notes, chosen)
    store = open_store(spec.any_job().output.path, s3=spec.any_job().s3.options())
    names = save(tracker, results, samples, store)
    _print_results(spec, options, model, manager, asker, results)
    print(f"{store.url}/{next(name for name in names if '/results_' in name)}")
    tidy(store)
    return OK


def _check_requests(spec: EvalSpec, model: Any, manager: Any, asker: Any) -> None:
    """Raise UserError for a request that the model or the decoder can't do, once the tasks have built their requests."""
    from draftmill.jobs.harness.tasks import check_requests

    check_requests(manager.tasks, spec, model.info)
    asked = [one for task in manager.tasks.values() for one in task.instances if one.request_type == "generate_until"]
    for how in {asker.generation(one.task_name, one.args[1]) for one in asked}:
        asker.job_for(how)("requests.jsonl", spec.any_job().output.path)


def _asked(asker: Any, spec: EvalSpec, options: EvalOptions, model: Any, manager: Any, tracker: Any) -> dict[str, Any]:
    """lm-evaluation-harness's own loop over the tasks: its results with the samples."""
    from lm_eval import simple_evaluate

    results: dict[str, Any] = simple_evaluate(
        model=asker,
        model_args={"pretrained": model.name, "decoder": spec.decoder},
        tasks=list(manager.tasks),
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
        task_manager=manager,
        predict_only=options.predict_only,
        random_seed=options.seeds[0],
        numpy_random_seed=options.seeds[1],
        torch_random_seed=options.seeds[2],
        fewshot_random_seed=options.seeds[3],
        confirm_run_unsafe_code=options.confirm_run_unsafe_code,
    )
    return results


def _print_results(
    spec: EvalSpec, options: EvalOptions, model: Any, manager: Any, asker: Any, results: dict[str, Any]
) -> None:
    from lm_eval.utils import make_table

    from draftmill.jobs.harness.results import failed_first, line_of, printed

    print(
        f"draftmill ({model.name}, {spec.decoder}), gen_kwargs: ({options.gen_kwargs or None}), limit: {options.limit}, "
        f"num_fewshot: {options.num_fewshot}"
    )
    print(printed(make_table, results))
    for name, sums in results["draftmill"].items():
        print(line_of(name, sums))
    for failed in failed_first(manager.tasks, asker.notes, options.samples or {}):
        print(f"draftmill: failed: {failed}", file=sys.stderr)
