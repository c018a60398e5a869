"""The commands and their options. What a command calls is imported when it runs: `--help` is quick.

The options that several commands share come first, then each command: its options, and the function that does its work. That
function's parameters are named after the options; `made` has those that are made of several options.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from datetime import datetime, timedelta
from importlib import import_module
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from draftmill.jobs.eval.options import HINT, SEEDS, documents, parse_settings, seeds, truth
from draftmill.storage.stores.store import Place, S3Options

if TYPE_CHECKING:
    from draftmill.jobs.config.spec import JobSpec

GRACE_VARIABLE = "DRAFTMILL_GRACE_SECONDS"


# ---- options and commands as data


Option: TypeAlias = Callable[[argparse._ActionsContainer], object]
"""Adds an option, or several, to a parser or to a group of one."""

Maker: TypeAlias = Callable[[argparse.Namespace], Any]
"""Makes a parameter of a command's function."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

COMMANDS: list[Callable[[Subparsers, argparse.ArgumentParser], None]] = []
"""Each adds a command, with the options that all commands have, in the order in which `draftmill --help` lists them."""


def command(
    name: str,
    help: str,
    work: str | Callable[[argparse.Namespace], str],
    *options: Option,
    resumes: bool = False,
    follows: bool = False,
    writes: bool = False,
    hint: str = "",
    settings: Mapping[str, Any] = {},
    **made: Maker,
) -> None:
    """Add a command whose work is the function `work` (`module:name`) of a room of jobs/; `settings` are those of its parser.

    `resumes`: the same command continues the work after an interruption. `follows`: it shows such work elsewhere. `writes`: a
    signal interrupts it in order, as it does commands that resume. `hint`: printed after unknown options.
    """

    def run(arguments: argparse.Namespace) -> int:
        with ExitStack() as block:
            if resumes or writes:
                from draftmill.jobs.drive.driver import forced_end, interruptible

                if arguments.is_program:
                    block.enter_context(forced_end(float(arguments.grace_s)))
                block.enter_context(interruptible())  # also the command's own imports, which take a while
            module, function_name = (work if isinstance(work, str) else work(arguments)).split(":")
            function = getattr(import_module(f"draftmill.jobs.{module}"), function_name)
            makers = {**MADE, **made}
            keys = inspect.signature(function).parameters
            return int(function(**{key: makers.get(key, attrgetter(key))(arguments) for key in keys}))

    def add(commands: Subparsers, common: argparse.ArgumentParser) -> None:
        parser = commands.add_parser(name, parents=[common], help=help, **settings)
        for option in options:
            option(parser)
        grace = os.environ.get(GRACE_VARIABLE, "30")  # a string, so that argparse checks it like the option
        parser.set_defaults(command=run, resumes=resumes, follows=follows, hint=hint, grace_s=grace)

    COMMANDS.append(add)


def option(name: str, metavar: str | None = None, help: str | None = None, **more: Any) -> Option:
    """An option with a value, or a positional argument; `more` is what argparse's `add_argument` takes."""
    return lambda parser: parser.add_argument(name, metavar=metavar, help=help, **more)


def repeatable(name: str, metavar: str, help: str, **more: Any) -> Option:
    """An option that may be given several times."""
    return option(name, metavar, help, action="append", default=[], **more)


def flag(name: str, help: str, *, action: str = "store_true", **more: Any) -> Option:
    """An option without a value."""
    return lambda parser: parser.add_argument(name, action=action, help=help, **more)


def choice(name: str, choices: list[str], help: str | None = None, **more: Any) -> Option:
    """An option with a few values, of which the first is the default."""
    return option(name, help=help, choices=choices, default=choices[0], **more)


def group(title: str | None, *options: Option, required: bool = False) -> Option:
    """Options under a title in the help; without a title only one of them may be given, and if `required` must be."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_argument_group(title) if title else parser.add_mutually_exclusive_group(required=required)
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


def _positive(text: str) -> float:
    if not _seconds(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number above 0")
    return float(text)


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


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# ---- options of several commands


SET = repeatable("--set", "KEY=VALUE", "override a key: a.b=VALUE", dest="overrides")
SPEC = (option("path", "SPEC.yaml"), SET)
LOGICAL_DATE = option(
    "--logical-date", "D", "the date for {date:...} in output.path, in UTC (2026-11-22, or with a time); default: now"
)
DRIVER = (
    option("--ray-address", "ADDR", "a running Ray cluster; default: start Ray on this machine"),
    flag("--local", "one worker in this process, without Ray: for small jobs"),
    flag("--quiet", "no progress, only results and errors"),
    choice("--log", ["text", "json"], "json: each thing that is printed is one JSON object a line"),
    option(
        "--grace-seconds",
        "S",
        "from SIGTERM to the end; units may run until 5 s before it",
        dest="grace_s",
        type=_seconds,
    ),
)
"""Options of every command that starts workers."""

S3_ENDPOINT = option("--s3-endpoint", "URL", "endpoint of an S3 service other than Amazon's")
"""For commands without a spec; region and credentials are those of boto3's environment."""

RUN_DIR = (option("place", "RUN_DIR", "a folder or s3://bucket/prefix"), S3_ENDPOINT)
BASELINE = option(
    "--baseline",
    "CASE",
    "what all others are compared with; default: the first run; in a sweep the first case that differs in one setting",
)


IF_RUNNING = choice(
    "--if-running",
    ["fail", "skip", "wait"],
    "if another driver works on this job: end with 4 (fail), end with exit code 0, or wait until it has ended",
)


def _address(default: str) -> Option:
    return option("--address", "URL", f"the cluster's dashboard, http://HOST:8265; default: {default}")


def _spec(arguments: argparse.Namespace) -> JobSpec:
    """The spec, with the logical date of the command line if there is one; UserError if either is unusable."""
    from draftmill.jobs.config.spec import load_spec, with_logical_date

    spec = load_spec(arguments.path, arguments.overrides)
    return spec if arguments.logical_date is None else with_logical_date(spec, arguments.logical_date)


def _built(name: str, **more: Maker) -> Maker:
    """Makes the dataclass `name` (`module:Class`) of the options that its fields are named after, and of `more`."""

    def make(arguments: argparse.Namespace) -> Any:
        kind = resolve_name(f"draftmill.jobs.{name}")
        given = {field.name: getattr(arguments, field.name) for field in fields(kind) if field.name in arguments}
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return kind(**given | {key: of(arguments) for key, of in more.items()})

    return make


def _place(arguments: argparse.Namespace, url: str | None = None) -> Place:
    return Place(url or arguments.place, S3Options(arguments.s3_endpoint))


RUN_OPTIONS: Final = _built("run.session:RunOptions")
"""The options in DRIVER; UserError if two of them exclude each other."""

MADE: Final[Mapping[str, Maker]] = {"place": _place, "options": RUN_OPTIONS}
"""Parameters of several commands' functions."""


# ---- a job


command(
    "run",
    "run a job, or resume it; idempotent",
    lambda arguments: "run.job:run_job" if arguments.first is None else "run.job:catch_up",
    *SPEC,
    *DRIVER,
    group(
        None,
        LOGICAL_DATE,
        option(
            "--catch-up",
            "D",
            "run each whole day or hour from D on (default: the earliest run's) that lacks a finished run",
            dest="first",
            nargs="?",
            const=True,
            type=_date,
        ),
    ),
    IF_RUNNING,
    resumes=True,
    spec=_spec,
    first=lambda arguments: None if arguments.first is True else arguments.first,
)


command(
    "submit",
    "run a job on a cluster through Ray's job API, and follow it; idempotent",
    "remote.submit:submit",
    *SPEC,
    _address("$RAY_API_SERVER_ADDRESS"),
    LOGICAL_DATE,
    IF_RUNNING,
    flag("--no-wait", "print the job's name and return", action="store_false", dest="wait"),
    option("--code", help="ship draftmill's code, or use the cluster's (ship)", choices=["ship", "installed"]),
    option("--working-dir", "FOLDER", "a folder that the job needs: rows, models, metrics"),
    repeatable("--shared", "FOLDER", "a folder that all nodes have under this name"),
    option("--runtime-env", "FILE", "YAML or JSON for Ray's job API: image_uri, pip, env_vars, ..."),
    option(
        "--grace-seconds",
        "S",
        "from a stop to the driver's own end; 15 s later it is killed",
        dest="grace_s",
        type=_seconds,
    ),
    follows=True,
    spec=_spec,
    options=_built("remote.submit:SubmitOptions", run=lambda arguments: ("--if-running", arguments.if_running)),
)
command(
    "stop",
    "end a submitted job, or this machine's driver of a run; both can be resumed",
    "remote.submit:stop",
    option("place", "TARGET", "the name of a submitted job, RUN_DIR or SPEC.yaml"),
    SET,
    LOGICAL_DATE,
    _address("none: a driver of this machine"),
    option("--wait-seconds", "S", "time to wait for the end (60)", dest="wait_s", type=_seconds, default=60.0),
    S3_ENDPOINT,
)
command(
    "validate",
    "dry run: check the spec, show the first canvas",
    lambda arguments: "run.validate:validate" if arguments.schema is None else "config.sweep_spec:print_schema",
    group(
        None,
        option("path", "SPEC.yaml", nargs="?"),
        option(
            "--schema",
            help="print the JSON Schema of a spec (job) or a sweep file (sweep)",
            nargs="?",
            const="job",
            choices=["job", "sweep"],
        ),
        required=True,
    ),
    SET,
    LOGICAL_DATE,
    spec=_spec,
)


# ---- a run directory


command(
    "status",
    "show the progress of a run, or the state of each run below a folder",
    "results.runs:status",
    option("place", "DIR", "a folder or s3://bucket/prefix"),
    S3_ENDPOINT,
    flag("--json", "all facts of the runs at or below the folder, as JSON", dest="as_json"),
)
command(
    "logs",
    "print what drivers and workers of a run noted",
    "results.runs:logs",
    *RUN_DIR,
    flag("--json", "one JSON object a line", dest="as_json"),
    flag("--follow", "follow the log while a driver works on the run"),
)
command(
    "verify",
    "check a run's promises from its files alone",
    "results.verify:verify",
    *RUN_DIR,
    option("--invariance", "N", "decode N samples again, alone", type=_whole(0), default=0),
)
command(
    "rerun",
    "decode the failed samples again, as a new pass",
    "run.job:rerun",
    *RUN_DIR,
    flag("--failed", "samples whose status is failed", required=True),
    SET,
    *DRIVER,
    resumes=True,
)
command(
    "export",
    "write a finished run's results to files",
    lambda arguments: "results.export:export" if arguments.to is None else "results.publish:publish",
    *RUN_DIR,
    choice("--format", ["parquet", "openai", "jsonl", "csv"], "default: parquet", dest="kind"),
    group(
        None,
        option("--out", "FILE", "a file, s3://bucket/key, or - (standard output)"),
        option("--to", "PLACE", "publish a dataset: hf://datasets/OWNER/NAME, s3://bucket/prefix, or a folder"),
        required=True,
    ),
    option("--file-mb", "N", "Parquet files of at most N MiB (--to: 128); --out is their folder", type=_whole(1, 4096)),
    option("--errors", "FILE", "separate file for samples that are not ok"),
    option("--columns", "A,B,...", "columns of the result table (default: all)", type=_names, default=()),
    choice("--order", ["plan", "input"], "order of the rows: as planned, or as in the inputs (plan)"),
    flag("--overwrite", "replace existing files"),
)
command(
    "prove",
    "decode rows of a published dataset again, here, and compare them with it",
    "run.prove:prove",
    option("place", "SOURCE", "what `export --to` wrote, or one of its Parquet files"),
    option("--rows", "N", "how many rows, evenly spread (20)", type=_whole(1), default=20),
    SET,
    S3_ENDPOINT,
    writes=True,
)


# ---- several runs


command(
    "compare",
    "compare finished runs of the same samples, paired",
    "compare.compare:compare",
    option("places", "RUN_DIR", "run directories, the first is the baseline; or a sweep's directory", nargs="+"),
    BASELINE,
    group(
        None,
        option("--json", help="all figures as JSON", dest="form", action="store_const", const="json", default="text"),
        option("--markdown", help="Markdown tables", dest="form", action="store_const", const="markdown"),
    ),
    option(
        "--plan",
        "WIDTH",
        "with these runs as a pilot: the rows for intervals this wide (high - low)",
        dest="width",
        type=float,
    ),
    S3_ENDPOINT,
    places=lambda arguments: [_place(arguments, url) for url in arguments.places],
)
command(
    "report",
    "write an HTML file with tables and plots of a run",
    "compare.report:report",
    *RUN_DIR,
    option("--out", "FILE.html", "the file to write", required=True),
    BASELINE,
    flag("--overwrite", "replace a file that is not a report"),
)
command(
    "show",
    "print rows as a person reads them, or write a page of them: what the model wrote, by which forward, and what failed",
    "compare.show:show",
    *RUN_DIR,
    repeatable("--id", "ID", "only this row, with all of its columns", dest="ids"),
    flag("--failed", "only samples that failed"),
    option("--limit", "N", "rows that are shown (10; with --html 1000)", type=_whole(1)),
    option("--html", "FILE", "write a page with a box that filters rows"),
    flag("--overwrite", "replace a file that is not a page of draftmill"),
)
command(
    "sweep",
    "run several variants of a job on the same workers, or resume them; idempotent",
    "sweep.sweep:sweep",
    option("path", "SWEEP.yaml"),
    flag("--dry-run", "show the cases in order and what a worker loads for each; write nothing"),
    SET,
    *DRIVER,
    resumes=True,
)
command(
    "measure",
    "measure metrics on a finished run's results",
    "run.job:measure",
    *RUN_DIR,
    option(
        "--metric",
        "NAME",
        "a metric (exact_match, rouge, pass@1, ...), a Python file of your own, or '{kind: ..., ...}'",
        dest="words",
        nargs="+",
        action="extend",
        required=True,
    ),
    option("--reference", "COLUMN", "kept column with the references"),
    flag("--allow-code-execution", "let pass@k run code that a model wrote, in a sandbox"),
    *DRIVER,
    resumes=True,
)


# ---- eval


command(
    "eval",
    "run lm-evaluation-harness's tasks with a spec's model and decoder, or resume that",
    "eval.evaluate:evaluate",
    *SPEC,
    *DRIVER,
    option("--tasks", "T", "names, patterns, files or folders", nargs="+", required=True),
    option("--include_path", "FOLDER", "tasks of your own"),
    option("--num_fewshot", "N", type=_whole(0)),
    group(
        None,
        option("--limit", "N", "documents of each task, or a share below 1; for trials", type=_positive),
        option("--samples", "JSON", 'documents of each task: {"task": [0, 5]}, or a file'),
    ),
    option("--gen_kwargs", "KEY=VALUE", "override generation_kwargs", nargs="+", default=[]),
    option("--apply_chat_template", "true|false", nargs="?", const=True, default=False, type=truth),
    option("--fewshot_as_multiturn", "true|false", nargs="?", const=True, type=truth),
    option("--system_instruction", "TEXT"),
    option(
        "--seed", "N", "of Python, numpy, torch, few-shot: one or four numbers", dest="seeds", type=seeds, default=SEEDS
    ),
    flag("--confirm_run_unsafe_code", "allow tasks that run generated code"),
    flag("--predict_only", "answers without scores"),
    flag("--log_samples", "has no effect: samples are always written"),
    flag("--write_out", "print the first prompts"),
    option("--metadata", "KEY=VALUE", "for tasks that need some", nargs="+", default=[]),
    resumes=True,
    hint=HINT,
    settings={"allow_abbrev": False},
    options=_built(
        "eval.options:EvalOptions",
        tasks=lambda arguments: tuple(name for names in arguments.tasks for name in _names(names)),
        samples=lambda arguments: documents(arguments.samples),
        gen_kwargs=lambda arguments: parse_settings(arguments.gen_kwargs, "--gen_kwargs"),
        metadata=lambda arguments: parse_settings(arguments.metadata, "--metadata"),
    ),
    run_options=RUN_OPTIONS,
)


# ---- recurring jobs


command(
    "prune",
    "delete the results of old runs of a recurring job",
    "run.pruning:prune",
    option("place", "BASE", "the folder before the date in output.path, or s3://bucket/prefix"),
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
    base=_place,
)


# ---- other places to run


command(
    "manifest",
    "print a file that runs the job on Kubernetes, Slurm or cron",
    "remote.manifest:manifest",
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
    settings={"description": "Prints a file that runs the job elsewhere. What has no option is a line of the file."},
    spec=attrgetter("path"),
    options=_built("remote.manifest:Options"),
)


# ---- what is known here


command("models", "list the model families and decoders", "arguments:models")


def models() -> int:
    from draftmill.actors.checkpoints.models import builtin_models
    from draftmill.decoders.backbones.families import any_causal
    from draftmill.decoders.backbones.families.table import FAMILIES
    from draftmill.decoders.backbones.quantized import METHODS
    from draftmill.decoders.settings import DECODERS, decoders_of
    from draftmill.jobs.config.sections import ModelSettings

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
