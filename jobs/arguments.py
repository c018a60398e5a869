"""The commands and their options. What a command calls is imported when it runs: `--help` is quick.

The options that several commands share come first, then each command: its options, and the function that does its work.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from draftmill.jobs.eval.options import HINT, SEEDS, EvalOptions, documents, parse_settings, seeds
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import Place, S3Options

if TYPE_CHECKING:
    from draftmill.jobs.config.spec import JobSpec
    from draftmill.jobs.run.session import RunOptions

GRACE_VARIABLE = "DRAFTMILL_GRACE_SECONDS"


# ---- options and commands as data


Option: TypeAlias = Callable[[argparse._ActionsContainer], object]
"""Adds an option, or several, to a parser or to a group of one."""

Action: TypeAlias = Callable[[argparse.Namespace], int]
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

COMMANDS: list[Callable[[Subparsers, argparse.ArgumentParser], None]] = []
"""Each adds a command, with the options that all commands have, in the order in which `draftmill --help` lists them."""


def command(
    name: str,
    help: str,
    *options: Option,
    resumes: bool = False,
    follows: bool = False,
    writes: bool = False,
    hint: str = "",
    **settings: Any,
) -> Callable[[Action], Action]:
    """Make a function the work of a command with these options; `settings` are those of its parser.

    `resumes`: the same command continues the work after an interruption. `follows`: it shows such work elsewhere. `writes`: a
    signal interrupts it in order, as it does commands that resume. `hint`: printed after unknown options.
    """

    def register(run: Action) -> Action:
        def interruptibly(arguments: argparse.Namespace) -> int:
            from draftmill.jobs.drive.driver import forced_end, interruptible

            force = forced_end(float(arguments.grace_seconds)) if arguments.is_program else nullcontext()
            with force, interruptible():  # also the command's own imports, which take a while
                return run(arguments)

        def add(commands: Subparsers, common: argparse.ArgumentParser) -> None:
            parser = commands.add_parser(name, parents=[common], help=help, **settings)
            for option in options:
                option(parser)
            grace = os.environ.get(GRACE_VARIABLE, "30")  # a string, so that argparse checks it like the option
            work = interruptibly if resumes or writes else run
            parser.set_defaults(command=work, resumes=resumes, follows=follows, hint=hint, grace_seconds=grace)

        COMMANDS.append(add)
        return run

    return register


def option(name: str, metavar: str | None = None, help: str | None = None, **more: Any) -> Option:
    """An option with a value, or a positional argument; `more` is what argparse's `add_argument` takes."""
    return lambda parser: parser.add_argument(name, metavar=metavar, help=help, **more)


def repeatable(name: str, metavar: str, help: str) -> Option:
    """An option that may be given several times."""
    return option(name, metavar, help, action="append", default=[])


def flag(name: str, help: str, **more: Any) -> Option:
    """An option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=help, **more)


def choice(name: str, choices: list[str], help: str | None = None) -> Option:
    """An option with a few values, of which the first is the default."""
    return option(name, help=help, choices=choices, default=choices[0])


def group(title: str | None, *options: Option) -> Option:
    """Options under a title in the help; without a title only one of them may be given."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_argument_group(title) if title else parser.add_mutually_exclusive_group()
        for option in options:
            option(group)

    return add


# ---- values


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number from 0")
    return value


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """The type of an option that is a whole number in this range."""
    allowed = f"a whole number from {least}" if most == math.inf else f"{least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {allowed}")
        return int(text)

    return read


def _date(text: str) -> datetime:
    from draftmill.jobs.config.dates import read_date

    try:
        return read_date(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _runs_or_age(text: str) -> int | timedelta:
    """A number of runs, or their age in days (30d) or weeks (4w)."""
    match = re.fullmatch(r"(\d{1,6})([dw]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a number of runs, or of days (30d) or weeks (4w)"
        )
    count = int(match[1])
    return timedelta(days=count * {"d": 1, "w": 7}[match[2]]) if match[2] else count


# ---- options of several commands


SET = repeatable("--set", "KEY=VALUE", "override a key: a.b=VALUE")
SPEC = (option("spec", "SPEC.yaml"), SET)
LOGICAL_DATE = option(
    "--logical-date", "D", "the date for {date:...} in output.path, in UTC (2026-11-22, or with a time); default: now"
)
DRIVER = (
    option("--ray-address", "ADDR", "a running Ray cluster; default: start Ray on this machine"),
    flag("--local", "one worker in this process, without Ray: for small jobs"),
    flag("--quiet", "no progress"),
    choice(
        "--log",
        ["text", "json"],
        "json: everything that is printed is one JSON object a line, with time, level and event",
    ),
    option(
        "--grace-seconds",
        "S",
        "time from SIGTERM to the end; running units may continue until 5 s before it",
        type=_seconds,
    ),
)
"""Options of every command that starts workers."""

S3_ENDPOINT = option("--s3-endpoint", "URL", "endpoint of an S3 service other than Amazon's")
"""For commands without a spec; region and credentials are those of boto3's environment."""

RUN_DIR = (option("run_dir", "RUN_DIR", "a folder or s3://bucket/prefix"), S3_ENDPOINT)
BASELINE = option(
    "--baseline",
    "CASE",
    "the run or case with which all others are compared; default: the first run, and in a sweep for each case the first "
    "one that differs in a single setting",
)


def _if_running(help: str) -> Option:
    return option("--if-running", help=help, choices=["skip", "wait", "fail"], default="fail")


IF_RUNNING = _if_running(
    "if another driver works on this job: end with exit code 0, wait until it has ended, or end with 4 (fail)"
)


def _address(default: str) -> Option:
    return option("--address", "URL", f"the cluster's dashboard, http://HOST:8265; default: {default}")


def _dated_spec(arguments: argparse.Namespace) -> JobSpec:
    """The spec, with the logical date of the command line if there is one; UserError if either is unusable."""
    from draftmill.jobs.config.spec import load_spec, with_logical_date

    spec = load_spec(arguments.spec, arguments.set)
    return spec if arguments.logical_date is None else with_logical_date(spec, arguments.logical_date)


def _run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options in DRIVER; UserError if two of them exclude each other."""
    from draftmill.jobs.run.session import RunOptions

    options = RunOptions(arguments.ray_address, arguments.local, arguments.grace_seconds)
    return replace(options, if_running=getattr(arguments, "if_running", options.if_running))


def _place(arguments: argparse.Namespace, url: str) -> Place:
    return Place(url, S3Options(arguments.s3_endpoint))


# ---- a job


@command(
    "run",
    "run a job, or resume it; idempotent",
    *SPEC,
    *DRIVER,
    group(
        None,
        LOGICAL_DATE,
        option(
            "--catch-up",
            "D",
            "run each whole day or hour from D on (default: the earliest run's) that lacks a finished run, oldest first",
            nargs="?",
            const=True,
            type=_date,
        ),
    ),
    IF_RUNNING,
    resumes=True,
)
def _run(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.run.catch_up import catch_up
    from draftmill.jobs.run.job import run_job

    options = _run_options(arguments)
    if arguments.catch_up is None:
        return run_job(_dated_spec(arguments), options)
    return catch_up(_dated_spec(arguments), options, None if arguments.catch_up is True else arguments.catch_up)


@command(
    "submit",
    "run a job on a cluster through Ray's job API, and follow it; idempotent",
    *SPEC,
    _address("$RAY_API_SERVER_ADDRESS"),
    LOGICAL_DATE,
    _if_running("as for `run`: another driver has the run"),
    flag("--no-wait", "print the job's name and return"),
    option("--code", help="ship draftmill's code, or use the cluster's (ship)", choices=["ship", "installed"]),
    option("--working-dir", "FOLDER", "a folder that the job needs: rows, models, metrics"),
    repeatable("--shared", "FOLDER", "a folder that all nodes have under this name"),
    option("--runtime-env", "FILE", "YAML or JSON for Ray's job API: image_uri, pip, env_vars, ..."),
    option(
        "--grace-seconds",
        "S",
        "time from a stop to the driver's end by itself; after 15 s more it is killed",
        type=_seconds,
    ),
    follows=True,
)
def _submit(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.remote.request import SubmitOptions
    from draftmill.jobs.remote.submit import submit

    options = SubmitOptions(
        code=arguments.code,
        working_dir=arguments.working_dir,
        runtime_env=arguments.runtime_env,
        shared=tuple(arguments.shared),
        grace_s=arguments.grace_seconds,
        run=("--if-running", arguments.if_running),
    )
    date, wait = arguments.logical_date, not arguments.no_wait
    return submit(arguments.spec, arguments.set, arguments.address, options, logical_date=date, wait=wait)


@command(
    "stop",
    "end a submitted job, or this machine's driver of a run; both can be resumed",
    option("target", "TARGET", "the name of a submitted job, RUN_DIR or SPEC.yaml"),
    SET,
    LOGICAL_DATE,
    _address("none: a driver of this machine"),
    option("--wait-seconds", "S", "how long to wait for the end (60); 0 returns at once", type=_seconds, default=60.0),
    S3_ENDPOINT,
)
def _stop(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.remote.submit import stop

    return stop(
        _place(arguments, arguments.target),
        arguments.address,
        overrides=arguments.set,
        logical_date=arguments.logical_date,
        wait_s=arguments.wait_seconds,
    )


@command("validate", "dry run: check the spec, show the first canvas", *SPEC, LOGICAL_DATE)
def _validate(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.run.validate import validate

    return validate(_dated_spec(arguments))


# ---- a run directory


@command("status", "show the progress of a run", *RUN_DIR)
def _status(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.results.status import status

    return status(_place(arguments, arguments.run_dir))


@command(
    "logs",
    "print what drivers and workers of a run noted",
    *RUN_DIR,
    flag("--json", "one JSON object a line"),
    flag("--follow", "go on printing while a driver works on the run"),
)
def _logs(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.results.status import logs

    return logs(_place(arguments, arguments.run_dir), as_json=arguments.json, follow=arguments.follow)


@command(
    "verify",
    "check a run's promises from its files alone",
    *RUN_DIR,
    option("--invariance", "N", "decode N samples again, alone", type=_whole(0), default=0),
)
def _verify(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.results.verify import verify

    return verify(_place(arguments, arguments.run_dir), invariance=arguments.invariance)


@command(
    "rerun",
    "decode the failed samples again, as a new pass",
    *RUN_DIR,
    flag("--failed", "samples whose status is failed", required=True),
    SET,
    *DRIVER,
    resumes=True,
)
def _rerun(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.run.job import rerun

    return rerun(_place(arguments, arguments.run_dir), _run_options(arguments), overrides=arguments.set)


@command(
    "export",
    "write a finished run's results to files",
    *RUN_DIR,
    option("--format", required=True, choices=["openai", "jsonl", "csv", "parquet"]),
    option("--out", "FILE", "a file, s3://bucket/key, or - (standard output)", required=True),
    option("--file-mb", "N", "Parquet files of at most N MiB; --out is their folder", type=_whole(1, 4096)),
    option("--errors", "FILE", "separate file for samples that are not ok"),
    option("--columns", "A,B,...", "columns of the result table (default: all)", default=""),
    choice("--order", ["plan", "input"], "order of the rows: as planned, or as in the inputs (plan)"),
    flag("--overwrite", "replace existing files"),
)
def _export(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.results.export import export

    return export(
        _place(arguments, arguments.run_dir),
        arguments.format,
        arguments.out,
        errors=arguments.errors,
        columns=[name for name in arguments.columns.split(",") if name],
        overwrite=arguments.overwrite,
        order=arguments.order,
        file_mb=arguments.file_mb,
    )


# ---- several runs


@command(
    "compare",
    "compare finished runs of the same samples, paired",
    option("run_dirs", "RUN_DIR", "run directories, the first is the baseline; or a sweep's directory", nargs="+"),
    BASELINE,
    group(
        None,
        option("--json", help="all figures as JSON", dest="form", action="store_const", const="json", default="text"),
        option("--markdown", help="Markdown tables", dest="form", action="store_const", const="markdown"),
    ),
    option("--plan", "WIDTH", "with these runs as a pilot: the rows for intervals this wide (high - low)", type=float),
    S3_ENDPOINT,
)
def _compare(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.compare.compare import compare

    places = [_place(arguments, run_dir) for run_dir in arguments.run_dirs]
    return compare(places, form=arguments.form, baseline=arguments.baseline, width=arguments.plan)


@command(
    "report",
    "write an HTML file with tables and plots of a run",
    *RUN_DIR,
    option("--out", "FILE.html", "the file to write", required=True),
    BASELINE,
    flag("--overwrite", "replace a file that is not a report"),
)
def _report(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.compare.report import report

    baseline, overwrite = arguments.baseline, arguments.overwrite
    return report(_place(arguments, arguments.run_dir), arguments.out, baseline=baseline, overwrite=overwrite)


@command(
    "show",
    "print rows as a person reads them, or write a page of them: what the model wrote, by which forward, and what failed",
    *RUN_DIR,
    repeatable("--id", "ID", "only this row, with all of its columns"),
    flag("--failed", "only samples that failed"),
    option("--limit", "N", "rows that are shown (10; with --html 1000)", type=_whole(1)),
    option("--html", "FILE", "write a page with a box that filters rows"),
    flag("--overwrite", "replace a file that is not a page of draftmill"),
)
def _show(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.compare.show import show

    return show(
        _place(arguments, arguments.run_dir),
        ids=arguments.id,
        failed=arguments.failed,
        limit=arguments.limit,
        html=arguments.html,
        overwrite=arguments.overwrite,
    )


@command(
    "sweep",
    "run several variants of a job on the same workers, or resume them; idempotent",
    option("sweep", "SWEEP.yaml"),
    flag("--dry-run", "show the cases in order and what a worker loads for each; write nothing"),
    SET,
    *DRIVER,
    resumes=True,
)
def _sweep(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.sweep.sweep import sweep

    return sweep(arguments.sweep, arguments.set, _run_options(arguments), dry_run=arguments.dry_run)


@command(
    "measure",
    "measure metrics on a finished run's results",
    *RUN_DIR,
    option(
        "--metric",
        "NAME",
        "a metric (exact_match, rouge, pass@1, ...), a Python file of your own, or '{kind: ..., ...}'",
        nargs="+",
        action="extend",
        required=True,
    ),
    option("--reference", "COLUMN", "kept column with the references"),
    flag("--allow-code-execution", "let pass@k run code that a model wrote, in a sandbox"),
    *DRIVER,
    resumes=True,
)
def _measure(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.run.job import measure

    return measure(
        _place(arguments, arguments.run_dir),
        arguments.metric,
        _run_options(arguments),
        allow_code_execution=arguments.allow_code_execution,
        reference=arguments.reference,
    )


# ---- eval


@command(
    "eval",
    "run lm-evaluation-harness's tasks with a spec's model and decoder, or resume that",
    *SPEC,
    *DRIVER,
    option("--tasks", "T", "names, patterns, files or folders", nargs="+", required=True),
    option("--include_path", "FOLDER", "tasks of your own"),
    option("--num_fewshot", "N", type=int),
    option("--limit", "N", "documents of each task, or a share below 1; for trials", type=float),
    option("--samples", "JSON", 'documents of each task: {"task": [0, 5]}, or a file'),
    option("--gen_kwargs", "KEY=VALUE", "override generation_kwargs", nargs="+", default=[]),
    option("--apply_chat_template", "true|false", nargs="?", const="true", default="false"),
    option("--fewshot_as_multiturn", "true|false", nargs="?", const="true"),
    option("--system_instruction", "TEXT"),
    option("--seed", "N", "of Python, numpy, torch, few-shot: one or four numbers"),
    flag("--confirm_run_unsafe_code", "allow tasks that run generated code"),
    flag("--predict_only", "answers without scores"),
    flag("--log_samples", "has no effect: samples are always written"),
    flag("--write_out", "print the first prompts"),
    option("--metadata", "KEY=VALUE", "for tasks that need some", nargs="+", default=[]),
    resumes=True,
    hint=HINT,
    allow_abbrev=False,
)
def _eval(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.eval.evaluate import evaluate

    return evaluate(arguments.spec, arguments.set, _eval_options(arguments), _run_options(arguments))


def _eval_options(arguments: argparse.Namespace) -> EvalOptions:
    multiturn, why = arguments.fewshot_as_multiturn, " (templates have no names here: the tokenizer's own is used)"
    given = {field.name: getattr(arguments, field.name) for field in fields(EvalOptions) if field.name in arguments}
    given |= {
        "tasks": tuple(name for names in arguments.tasks for name in names.split(",") if name),
        "samples": documents(arguments.samples),
        "gen_kwargs": parse_settings(arguments.gen_kwargs, "--gen_kwargs"),
        "apply_chat_template": _truth(arguments.apply_chat_template, "--apply_chat_template", why),
        "fewshot_as_multiturn": None if multiturn is None else _truth(multiturn, "--fewshot_as_multiturn"),
        "seeds": SEEDS if arguments.seed is None else seeds(arguments.seed),
        "metadata": parse_settings(arguments.metadata, "--metadata"),
    }
    return EvalOptions(**given)


def _truth(text: str, name: str, why: str = "") -> bool:
    if text.lower() not in {"true", "false"}:
        raise UserError(f"{text!r} is not allowed; allowed: true, false{why}", field=name)
    return text.lower() == "true"


# ---- recurring jobs


@command(
    "list",
    "list the runs below a folder, with their state",
    option("folder", "DIR", "a folder or s3://bucket/prefix"),
    flag("--json", "all facts as JSON", dest="as_json"),
    S3_ENDPOINT,
)
def _list(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.results.status import list_runs

    return list_runs(_place(arguments, arguments.folder), as_json=arguments.as_json)


@command(
    "prune",
    "delete the results of old runs of a recurring job",
    option("base", "BASE", "the folder before the date in output.path, or s3://bucket/prefix"),
    option(
        "--keep",
        "N|Nd|Nw",
        "runs that stay: the N newest, those of the last N days, or of N weeks; several: all of them",
        nargs="+",
        action="extend",
        required=True,
        type=_runs_or_age,
    ),
    flag("--yes", "delete; without it nothing is deleted"),
    S3_ENDPOINT,
    writes=True,
)
def _prune(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.run.pruning import KeepRule, prune

    counts = [value for value in arguments.keep if isinstance(value, int)]
    ages = [value for value in arguments.keep if isinstance(value, timedelta)]
    keep = KeepRule(max(counts, default=None), max(ages, default=None))
    return prune(_place(arguments, arguments.base), keep, yes=arguments.yes)


# ---- other places to run


@command(
    "manifest",
    "print a file that runs the job on Kubernetes, Slurm or cron",
    *SPEC,
    option(
        "--for",
        help="who runs the job",
        dest="kind",
        required=True,
        choices=("rayjob", "raycluster", "cronjob", "slurm", "cron"),
    ),
    option("--schedule", "CRON", "cronjob, slurm, cron: 'minute hour day month weekday'; default: '0 3 * * *'"),
    option("--secret", "NAME", "credentials by reference: a Kubernetes Secret; elsewhere a file of KEY=VALUE lines"),
    option("--nodes", "N", "rayjob, raycluster, slurm: nodes for the spec's workers", type=_whole(1)),
    repeatable("--shared-path", "FOLDER", "a folder that all nodes see, so that specs may use it; not cron"),
    group(
        "Kubernetes (rayjob, raycluster, cronjob)",
        option("--image", help="image of draftmill; default: draftmill:0.1.0"),
        option("--service-account", "NAME", "with the right to S3, so that no Secret is needed"),
        repeatable("--volume", "CLAIM:FOLDER", "mount a persistent volume claim everywhere; not cronjob"),
        option("--ray-cluster", "NAME", "cronjob: the RayCluster that runs the job; default: draftmill"),
    ),
    description="Prints a file that runs the job elsewhere or on a schedule. What has no option is a line of the file.",
)
def _manifest(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.remote.manifest import manifest
    from draftmill.jobs.remote.manifest_job import Options

    given: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return manifest(arguments.spec, arguments.set, Options(**given))


@command(
    "schema",
    "print the JSON Schema of a spec, or of a sweep file, from which an editor completes keys",
    option("file", help="job (the default) or sweep", nargs="?", choices=["job", "sweep"], default="job"),
)
def _schema(arguments: argparse.Namespace) -> int:
    import json

    from draftmill.jobs.config.spec import json_schema
    from draftmill.jobs.config.sweep_spec import sweep_schema

    print(json.dumps(sweep_schema() if arguments.file == "sweep" else json_schema(), indent=2, ensure_ascii=False))
    return 0


@command("models", "list the model families and decoders")
def _models(_: argparse.Namespace) -> int:
    from draftmill.actors.checkpoints.models import builtin_models
    from draftmill.decoders.backbones.families import any_causal
    from draftmill.decoders.backbones.families.table import FAMILIES
    from draftmill.decoders.backbones.quantized import METHODS
    from draftmill.decoders.settings import DECODERS, decoders_of
    from draftmill.jobs.config.spec import ModelSettings

    print("families (model.family; read from config.json with auto)")
    for name, family in sorted(FAMILIES.items()):
        print(f"  {name:<16} decoders: {', '.join(decoders_of(family.kind))}")
    print(f"any other causal model of transformers (model_type in config.json; here is version {any_causal.version()})")
    print(f"  decoders: {', '.join(decoders_of('causal'))}")
    print(f"  compared with transformers {any_causal.TESTED_WITH}: {', '.join(any_causal.TESTED)}")
    print(f"weights (model.weights): {', '.join(get_args(ModelSettings.model_fields['weights'].annotation))}")
    print(f"quantized checkpoints (quantization_config.quant_method): {', '.join(METHODS)}")
    print("decoders (decoder.kind)")
    for kind, settings in DECODERS.items():
        print(f"  {kind:<16} {(settings.__doc__ or '').strip().splitlines()[0]}")
        if names := [name for name in settings.model_fields if name != "kind"]:
            print(f"  {'':<16} settings: {', '.join(names)}")
    print("builtin models (model.path; a draft head is a drafter's path)")
    for name in builtin_models():
        print(f"  builtin:{name}")
    return 0
