"""The options of every command, and what is called with them. Commands are imported when they run: `--help` is quick.

Options that several commands share come first.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from draftmill.jobs.harness.options import REFUSED, SEEDS, EvalOptions, documents, named, seeds
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import S3Options

if TYPE_CHECKING:
    from draftmill.jobs.recurring.pruning import Keep
    from draftmill.jobs.running.session import RunOptions
    from draftmill.jobs.spec.job_spec import JobSpec


GRACE_VARIABLE = "DRAFTMILL_GRACE_SECONDS"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def spec_arguments(command: argparse.ArgumentParser) -> None:
    """Add the spec and `--set`."""
    command.add_argument("spec", metavar="SPEC.yaml")
    set_argument(command)


def set_argument(command: argparse.ArgumentParser) -> None:
    """Add `--set KEY=VALUE`, which may be given several times."""
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key: a.b=VALUE")


def date_argument(command: argparse.ArgumentParser) -> None:
    """Add `--logical-date`."""
    command.add_argument(
        "--logical-date",
        metavar="D",
        help="the date for {date:...} in output.path, in UTC (2026-11-22, or with a time); default: now",
    )


def if_running_argument(command: argparse.ArgumentParser) -> None:
    """Add `--if-running`."""
    command.add_argument(
        "--if-running",
        default="fail",
        choices=["skip", "wait", "fail"],
        help="if another driver works on this job: end with exit code 0, wait until it has ended, or end with 4 (fail)",
    )


def dated_spec(spec: JobSpec, logical_date: str | None) -> JobSpec:
    """The spec with the logical date of the command line, if there is one; UserError if it is none, or has no use."""
    from draftmill.jobs.spec.job_spec import with_logical_date

    return spec if logical_date is None else with_logical_date(spec, logical_date)


def driver_arguments(command: argparse.ArgumentParser) -> None:
    """Add what every command that starts workers takes."""
    command.add_argument(
        "--ray-address", metavar="ADDR", help="a running Ray cluster; default: start Ray on this machine"
    )
    command.add_argument("--local", action="store_true", help="one worker in this process, without Ray: for small jobs")
    command.add_argument("--quiet", action="store_true", help="no progress")
    command.add_argument(
        "--log",
        default="text",
        choices=["text", "json"],
        help="json: everything that is printed is one JSON object a line, with time, level and event",
    )
    grace_s = os.environ.get(GRACE_VARIABLE, "30")  # a string, so that argparse checks it like the option
    command.add_argument(
        "--grace-seconds",
        type=seconds,
        default=grace_s,
        metavar="S",
        help="time from SIGTERM to the end; running units may continue until 5 s before it",
    )


def store_arguments(command: argparse.ArgumentParser) -> None:
    """Add a run directory and the options of S3."""
    command.add_argument("run_dir", metavar="RUN_DIR", help="a folder or s3://bucket/prefix")
    s3_arguments(command)


def baseline_argument(command: argparse.ArgumentParser) -> None:
    """Add --baseline."""
    command.add_argument(
        "--baseline",
        metavar="CASE",
        help="the run or case with which all others are compared; default: the first run, and in a sweep for each case the first "
        "one that differs in a single setting",
    )


def s3_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of S3, for commands without a spec."""
    command.add_argument("--s3-endpoint", metavar="URL", help="endpoint of an S3 service other than Amazon's")
    command.add_argument("--s3-region", metavar="REGION")
    command.add_argument("--s3-addressing", default="auto", choices=["auto", "path", "virtual"])
    command.add_argument("--s3-checksums", default="auto", choices=["auto", "when_required", "when_supported"])


def seconds(text: str) -> float:
    """A number of seconds from 0; argparse shows the error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number from 0")
    return value


def count(text: str) -> int:
    """A whole number from 0; argparse shows the error."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 0")
    return int(text)


def megabytes(text: str) -> int:
    """1 to 4096; argparse shows the error."""
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 to 4096")
    return int(text)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options of driver_arguments as the commands take them; UserError if two of them exclude each other."""
    from draftmill.jobs.running.session import RunOptions

    if arguments.local and arguments.ray_address is not None:
        raise UserError("--local runs without Ray; allowed: only one of the two options", field="--ray-address")
    return RunOptions(arguments.ray_address, arguments.local, arguments.quiet, arguments.grace_seconds)


def s3_options(arguments: argparse.Namespace) -> S3Options:
    """The options of s3_arguments as the stores take them."""
    return S3Options(arguments.s3_endpoint, arguments.s3_region, arguments.s3_addressing, arguments.s3_checksums)


# ---- run -----------------------------------------------------------------------------------------------------------


def add_run(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("run", parents=[common], help="run a job, or resume it; idempotent")
    spec_arguments(command)
    driver_arguments(command)
    date_argument(command)
    if_running_argument(command)
    command.set_defaults(command=_run, resumes=True)


def _run(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():  # the imports take a while, too
        from draftmill.jobs.running.run import run_job
        from draftmill.jobs.spec.job_spec import load_spec

        spec = dated_spec(load_spec(arguments.spec, arguments.set), arguments.logical_date)
        return run_job(spec, replace(run_options(arguments), if_running=arguments.if_running))


# ---- submit --------------------------------------------------------------------------------------------------------


ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"


def add_submit(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "submit", parents=[common], help="run a job on a cluster through Ray's job API, and follow it; idempotent"
    )
    spec_arguments(command)
    address_argument(command)
    date_argument(command)
    command.add_argument(
        "--if-running",
        default="fail",
        choices=["skip", "wait", "fail"],
        help="as for `run`: another driver has the run",
    )
    command.add_argument("--no-wait", action="store_true", help="print the job's name and return")
    command.add_argument(
        "--code", choices=["ship", "installed"], help="ship draftmill's code, or use the cluster's (ship)"
    )
    command.add_argument("--working-dir", metavar="FOLDER", help="a folder that the job needs: rows, models, metrics")
    command.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave out files, as in .gitignore"
    )
    command.add_argument(
        "--shared", action="append", default=[], metavar="FOLDER", help="a folder that all nodes have under this name"
    )
    command.add_argument("--image", metavar="IMAGE", help="container image with draftmill; the nodes need podman")
    command.add_argument("--pip", action="append", default=[], metavar="REQUIREMENT", help="install with pip first")
    command.add_argument("--requirements", action="append", default=[], metavar="FILE", help="a file of requirements")
    command.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the job; no secrets"
    )
    command.add_argument("--driver-cpus", type=seconds, default=0.0, metavar="N", help="run the driver on any node")
    command.add_argument(
        "--grace-seconds",
        type=seconds,
        default=os.environ.get(GRACE_VARIABLE, "30"),
        metavar="S",
        help="time from a stop to the driver's end by itself; after 15 s more it is killed",
    )
    command.set_defaults(command=_submit, follows=True)


def address_argument(command: argparse.ArgumentParser, default: str = f"${ADDRESS_VARIABLE}") -> None:
    """Add the cluster's address; `default` says what happens without it."""
    command.add_argument(
        "--address", metavar="URL", help=f"the cluster's dashboard, http://HOST:8265; default: {default}"
    )


def _submit(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.submit import address_of, submit
    from draftmill.jobs.submitting.request import SubmitOptions, requirements

    address = address_of(arguments.address, os.environ.get(ADDRESS_VARIABLE))
    options = SubmitOptions(
        code=arguments.code,
        working_dir=arguments.working_dir,
        excludes=tuple(arguments.exclude),
        shared=tuple(arguments.shared),
        image=arguments.image,
        pip=(*arguments.pip, *requirements(arguments.requirements)),
        env=tuple(arguments.env),
        grace_s=arguments.grace_seconds,
        driver_cpus=arguments.driver_cpus,
        run=("--if-running", arguments.if_running),
    )
    return submit(
        arguments.spec,
        arguments.set,
        address,
        options,
        logical_date=arguments.logical_date,
        wait=not arguments.no_wait,
    )


# ---- stop ----------------------------------------------------------------------------------------------------------


def add_stop(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "stop", parents=[common], help="end a submitted job, or this machine's driver of a run; both can be resumed"
    )
    command.add_argument("target", metavar="TARGET", help="the name of a submitted job, RUN_DIR or SPEC.yaml")
    set_argument(command)
    date_argument(command)
    address_argument(command, default="none: a driver of this machine")
    command.add_argument(
        "--wait-seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long to wait for the end (60); 0 returns at once",
    )
    s3_arguments(command)
    command.set_defaults(command=_stop)


def _stop(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.stop import stop

    return stop(
        arguments.target,
        arguments.address,
        overrides=arguments.set,
        logical_date=arguments.logical_date,
        wait_s=arguments.wait_seconds,
        s3=s3_options(arguments),
    )


# ---- validate ------------------------------------------------------------------------------------------------------


def add_validate(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("validate", parents=[common], help="dry run: check the spec, show the first canvas")
    spec_arguments(command)
    date_argument(command)
    command.set_defaults(command=_validate)


def _validate(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.validate import validate
    from draftmill.jobs.spec.job_spec import load_spec

    return validate(dated_spec(load_spec(arguments.spec, arguments.set), arguments.logical_date))


# ---- status --------------------------------------------------------------------------------------------------------


def add_status(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("status", parents=[common], help="show the progress of a run")
    store_arguments(command)
    command.set_defaults(command=_status)


def _status(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.status import status

    return status(arguments.run_dir, s3=s3_options(arguments))


# ---- logs ----------------------------------------------------------------------------------------------------------


def add_logs(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("logs", parents=[common], help="print what drivers and workers of a run noted")
    store_arguments(command)
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.add_argument("--follow", action="store_true", help="go on printing while a driver works on the run")
    command.set_defaults(command=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.logs import logs

    return logs(arguments.run_dir, as_json=arguments.json, follow=arguments.follow, s3=s3_options(arguments))


# ---- verify --------------------------------------------------------------------------------------------------------


def add_verify(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("verify", parents=[common], help="check a run's promises from its files alone")
    store_arguments(command)
    command.add_argument("--invariance", type=count, default=0, metavar="N", help="decode N samples again, alone")
    command.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.verifying.verify import verify

    return verify(arguments.run_dir, s3=s3_options(arguments), invariance=arguments.invariance)


# ---- rerun ---------------------------------------------------------------------------------------------------------


def add_rerun(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("rerun", parents=[common], help="decode the failed samples again, as a new pass")
    store_arguments(command)
    command.add_argument("--failed", action="store_true", required=True, help="samples whose status is failed")
    set_argument(command)
    driver_arguments(command)
    command.set_defaults(command=_rerun, resumes=True)


def _rerun(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.rerun import rerun

        return rerun(arguments.run_dir, run_options(arguments), overrides=arguments.set, s3=s3_options(arguments))


# ---- compact -------------------------------------------------------------------------------------------------------


def add_compact(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("compact", parents=[common], help="gone: use export --format parquet --file-mb N")
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(command=_compact)


def _compact(_: argparse.Namespace) -> int:
    raise UserError(
        "is gone; use `draftmill export RUN_DIR --format parquet --file-mb 128 --out FOLDER`", field="draftmill compact"
    )


# ---- export --------------------------------------------------------------------------------------------------------


def add_export(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("export", parents=[common], help="write a finished run's results to files")
    store_arguments(command)
    command.add_argument("--format", required=True, choices=["openai", "jsonl", "csv", "parquet"])
    command.add_argument("--out", required=True, metavar="FILE", help="a file, s3://bucket/key, or - (standard output)")
    command.add_argument(
        "--file-mb", type=megabytes, metavar="N", help="Parquet files of at most N MiB; --out is their folder"
    )
    command.add_argument("--errors", metavar="FILE", help="separate file for samples that are not ok")
    command.add_argument("--columns", default="", metavar="A,B,...", help="columns of the result table (default: all)")
    command.add_argument(
        "--order",
        default="plan",
        choices=["plan", "input"],
        help="order of the rows: as planned, or as in the inputs (plan)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    command.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.exporting.export import export

    return export(
        arguments.run_dir,
        arguments.format,
        arguments.out,
        errors=arguments.errors,
        columns=[name for name in arguments.columns.split(",") if name],
        overwrite=arguments.overwrite,
        order=arguments.order,
        file_mb=arguments.file_mb,
        s3=s3_options(arguments),
    )


# ---- compare -------------------------------------------------------------------------------------------------------


def add_compare(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("compare", parents=[common], help="compare finished runs of the same samples, paired")
    command.add_argument(
        "run_dirs",
        nargs="+",
        metavar="RUN_DIR",
        help="run directories, the first is the baseline; or a sweep's directory",
    )
    baseline_argument(command)
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="all figures as JSON")
    forms.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="Markdown tables")
    s3_arguments(command)
    command.set_defaults(command=_compare, form="text")


def _compare(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.compare import compare

    return compare(arguments.run_dirs, form=arguments.form, baseline=arguments.baseline, s3=s3_options(arguments))


# ---- report --------------------------------------------------------------------------------------------------------


def add_report(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("report", parents=[common], help="write an HTML file with tables and plots of a run")
    store_arguments(command)
    command.add_argument("--out", required=True, metavar="FILE.html", help="the file to write")
    baseline_argument(command)
    command.add_argument("--overwrite", action="store_true", help="replace a file that is not a report")
    command.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.report import report

    return report(
        arguments.run_dir,
        arguments.out,
        baseline=arguments.baseline,
        overwrite=arguments.overwrite,
        s3=s3_options(arguments),
    )


# ---- sweep ---------------------------------------------------------------------------------------------------------


def add_sweep(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "sweep", parents=[common], help="run several variants of a job on the same workers, or resume them; idempotent"
    )
    command.add_argument("sweep", metavar="SWEEP.yaml")
    command.add_argument("--dry-run", action="store_true", help="show the cases, their tokens and time; write nothing")
    set_argument(command)
    driver_arguments(command)
    command.set_defaults(command=_sweep, resumes=True)


def _sweep(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.sweeping.sweep import sweep

        return sweep(arguments.sweep, arguments.set, run_options(arguments), dry_run=arguments.dry_run)


# ---- measure -------------------------------------------------------------------------------------------------------


def add_measure(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("measure", parents=[common], help="measure metrics on a finished run's results")
    store_arguments(command)
    command.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME",
        help="a metric (exact_match, rouge, pass@1, ...), a Python file of your own, or '{kind: ..., ...}'",
    )
    command.add_argument("--reference", metavar="COLUMN", help="kept column with the references")
    command.add_argument(
        "--allow-code-execution", action="store_true", help="let pass@k run code that a model wrote, in a sandbox"
    )
    driver_arguments(command)
    command.set_defaults(command=_measure, resumes=True)


def _measure(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.measure import measure

        return measure(
            arguments.run_dir,
            arguments.metric,
            run_options(arguments),
            allow_code_execution=arguments.allow_code_execution,
            reference=arguments.reference,
            s3=s3_options(arguments),
        )


# ---- eval ----------------------------------------------------------------------------------------------------------


def add_evaluate(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "eval",
        parents=[common],
        allow_abbrev=False,
        help="run lm-evaluation-harness's tasks with a spec's model and decoder, or resume that",
    )
    spec_arguments(command)
    driver_arguments(command)
    command.add_argument("--tasks", nargs="+", required=True, metavar="T", help="names, patterns, files or folders")
    command.add_argument("--include_path", metavar="FOLDER", help="tasks of your own")
    command.add_argument("--num_fewshot", type=int, metavar="N")
    command.add_argument(
        "--limit", type=float, metavar="N", help="documents of each task, or a share below 1; for trials"
    )
    command.add_argument("--samples", metavar="JSON", help='documents of each task: {"task": [0, 5]}, or a file')
    command.add_argument("--gen_kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="override generation_kwargs")
    command.add_argument("--apply_chat_template", nargs="?", const="true", default="false", metavar="true|false")
    command.add_argument("--fewshot_as_multiturn", nargs="?", const="true", metavar="true|false")
    command.add_argument("--system_instruction", metavar="TEXT")
    command.add_argument("--seed", metavar="N", help="of Python, numpy, torch, few-shot: one or four numbers")
    command.add_argument("--confirm_run_unsafe_code", action="store_true", help="allow tasks that run generated code")
    command.add_argument("--predict_only", action="store_true", help="answers without scores")
    command.add_argument("--log_samples", action="store_true", help="has no effect: samples are always written")
    command.add_argument("--write_out", action="store_true", help="print the first prompts")
    command.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="for tasks that need some")
    for option, reason in REFUSED.items():
        command.add_argument(option, nargs="*", action=_Refused, reason=reason, help=argparse.SUPPRESS)
    command.set_defaults(command=_eval, resumes=True)


def _eval(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.evaluate import evaluate

        return evaluate(arguments.spec, arguments.set, _eval_options(arguments), run_options(arguments))


class _Refused(argparse.Action):
    """An option that is known and not supported, with the reason."""

    def __init__(self, *, reason: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]}: {self._reason}")


def _eval_options(arguments: argparse.Namespace) -> EvalOptions:
    multiturn = arguments.fewshot_as_multiturn
    return EvalOptions(
        tasks=tuple(name for given in arguments.tasks for name in given.split(",") if name),
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        samples=documents(arguments.samples),
        include_path=arguments.include_path,
        gen_kwargs=named(arguments.gen_kwargs, "--gen_kwargs"),
        apply_chat_template=_truth(arguments.apply_chat_template, "--apply_chat_template"),
        fewshot_as_multiturn=None if multiturn is None else _truth(multiturn, "--fewshot_as_multiturn"),
        system_instruction=arguments.system_instruction,
        seeds=SEEDS if arguments.seed is None else seeds(arguments.seed),
        confirm_run_unsafe_code=arguments.confirm_run_unsafe_code,
        predict_only=arguments.predict_only,
        write_out=arguments.write_out,
        metadata=named(arguments.metadata, "--metadata"),
    )


def _truth(text: str, option: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise UserError(
            f"{text!r} is not allowed; allowed: true, false (templates have no names here: the tokenizer's own is used)"
            if option == "--apply_chat_template"
            else f"{text!r} is not allowed; allowed: true, false",
            field=option,
        )
    return text.lower() == "true"


# ---- list ----------------------------------------------------------------------------------------------------------


def add_list_runs(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("list", parents=[common], help="list the runs below a folder, with their state")
    command.add_argument("folder", metavar="DIR", help="a folder or s3://bucket/prefix")
    command.add_argument("--json", dest="as_json", action="store_true", help="all facts as JSON")
    s3_arguments(command)
    command.set_defaults(command=_list)


def _list(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.list_runs import list_runs

    return list_runs(arguments.folder, as_json=arguments.as_json, s3=s3_options(arguments))


# ---- catchup -------------------------------------------------------------------------------------------------------


def add_catchup(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "catchup", parents=[common], help="list, or run, the dates of a recurring job that lack a finished run"
    )
    spec_arguments(command)
    driver_arguments(command)
    command.add_argument(
        "--from", dest="first", type=date, metavar="D", help="first date (default: the earliest run's)"
    )
    command.add_argument("--to", dest="last", type=date, metavar="D", help="last date (default: the last whole period)")
    command.add_argument(
        "--every", type=periods, default=1, metavar="N", help="every Nth day, hour, ... of the path's date (1)"
    )
    command.add_argument("--run", action="store_true", help="run these dates, oldest first")
    if_running_argument(command)
    command.set_defaults(command=_catchup, resumes=True)


def date(text: str) -> datetime:
    """A date; argparse shows the error."""
    from draftmill.jobs.spec.dated_path import read_date

    try:
        return read_date(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def periods(text: str) -> int:
    """A whole number from 1; argparse shows the error."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 1")
    return int(text)


def _catchup(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.catchup import catchup
        from draftmill.jobs.spec.job_spec import load_spec

        return catchup(
            load_spec(arguments.spec, arguments.set),
            replace(run_options(arguments), if_running=arguments.if_running),
            first=arguments.first,
            last=arguments.last,
            every=arguments.every,
            run=arguments.run,
        )


# ---- prune ---------------------------------------------------------------------------------------------------------


DAYS = {"d": 1, "w": 7}
"""Days in each unit of an age."""


def add_prune(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("prune", parents=[common], help="delete the results of old runs of a recurring job")
    command.add_argument(
        "base", metavar="BASE", help="the folder before the date in output.path, or s3://bucket/prefix"
    )
    command.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        required=True,
        type=kept,
        metavar="N|Nd|Nw",
        help="runs that stay: the N newest, those of the last N days, or of N weeks; several: all of them",
    )
    command.add_argument("--unfinished", action="store_true", help="delete unfinished runs, too; they prove nothing")
    command.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    s3_arguments(command)
    command.set_defaults(command=_prune)


def kept(text: str) -> int | timedelta:
    """A number of runs, or an age; argparse shows the error."""
    found = re.fullmatch(r"(\d{1,6})([dw]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a number of runs, or of days (30d) or weeks (4w)"
        )
    count = int(found[1])
    return timedelta(days=count * DAYS[found[2]]) if found[2] else count


def _prune(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.prune import prune

        return prune(
            arguments.base,
            _keep(arguments.keep),
            yes=arguments.yes,
            unfinished=arguments.unfinished,
            s3=s3_options(arguments),
        )


def _keep(given: list[int | timedelta]) -> Keep:
    from draftmill.jobs.recurring.pruning import Keep

    counts = [one for one in given if isinstance(one, int)]
    ages = [one for one in given if isinstance(one, timedelta)]
    return Keep(max(counts, default=None), max(ages, default=None))


# ---- manifest ------------------------------------------------------------------------------------------------------


KINDS = ("rayjob", "raycronjob", "raycluster", "cronjob", "slurm", "cron", "systemd", "ray-up")


def add_manifest(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "manifest",
        parents=[common],
        help="write a file that runs the job on Kubernetes, Slurm, cron, systemd or Ray's launcher",
        description="Prints a file that runs the job elsewhere or on a schedule. Each option says to which kinds it applies.",
    )
    spec_arguments(command)
    command.add_argument("--for", dest="kind", required=True, choices=KINDS, help="who runs the job")
    command.add_argument("--out", metavar="FILE", help="write to a file, or to a folder; default: print")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    _job_options(command)
    _size_options(command)
    _kubernetes_options(command)
    _machine_options(command)
    command.set_defaults(command=_manifest)


def _job_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", help="name of the job there; default: from the spec's name")
    command.add_argument("--logical-date", metavar="DATE", help="rayjob with a date in output.path; default: now (UTC)")
    command.add_argument("--schedule", metavar="CRON", help="'minute hour day month weekday'; default: '0 3 * * *'")
    command.add_argument("--time-zone", metavar="ZONE", help="raycronjob, cronjob, systemd: for example Europe/Berlin")
    command.add_argument("--time-limit", metavar="TIME", help="of one run, like 12h; default: 24h. Not for ray-up")
    command.add_argument(
        "--retries", type=count, metavar="N", help="starts after a run that did not finish; default: 3"
    )
    command.add_argument("--auth", metavar="MODE", help="RAY_AUTH_MODE: token (the default) or disabled")
    command.add_argument(
        "--secret",
        metavar="NAME",
        help="credentials by reference: a Kubernetes Secret; elsewhere a file of KEY=VALUE lines",
    )


def _size_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "nodes (rayjob, raycronjob, raycluster, slurm; default: from the spec's workers)"
    )
    group.add_argument("--nodes", type=count, metavar="N", help="nodes with workers; also ray-up")
    group.add_argument(
        "--max-nodes", type=count, metavar="N", help="let the autoscaler add nodes; also ray-up, not slurm"
    )
    group.add_argument("--cpus-per-node", type=count, metavar="N")
    group.add_argument("--gpus-per-node", type=count, metavar="N")
    group.add_argument("--memory-per-node", metavar="SIZE", help="default: 8Gi")


def _kubernetes_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("Kubernetes (rayjob, raycronjob, raycluster, cronjob)")
    group.add_argument("--image", help="image of draftmill; also ray-up; default: draftmill:0.1.0")
    group.add_argument("--namespace", metavar="NAME")
    group.add_argument("--service-account", metavar="NAME", help="with the right to S3, so that no Secret is needed")
    group.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:FOLDER",
        help="mount a persistent volume claim everywhere",
    )
    group.add_argument("--ray-cluster", metavar="NAME", help="cronjob: the RayCluster that runs the job")


def _machine_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("machines")
    group.add_argument(
        "--shared-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder that all nodes see, so that specs may use it",
    )
    group.add_argument(
        "--head-address",
        metavar="ADDR",
        help="cronjob, cron, systemd: a Ray cluster's address; ray-up: the head machine",
    )
    group.add_argument("--worker-address", action="append", default=[], metavar="ADDR", help="ray-up: a worker machine")
    group.add_argument("--ssh-user", metavar="USER", help="ray-up; default: ubuntu")
    group.add_argument("--region", help="ray-up on AWS; default: us-west-2")
    group.add_argument("--instance-type", metavar="TYPE", help="ray-up on AWS: machines of the workers")
    group.add_argument("--account", help="slurm")
    group.add_argument("--partition", help="slurm")
    group.add_argument("--user", help="cron: write an entry for /etc/cron.d; systemd: who runs the job")
    group.add_argument("--program", metavar="PATH", help="slurm, cron, systemd: draftmill's path; default: this one")
    group.add_argument("--directory", metavar="PATH", help="slurm, cron, systemd: working directory; default: this one")


def _manifest(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.manifests.options import Options
    from draftmill.jobs.manifests.write import manifest

    given: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = Options(**given)
    return manifest(arguments.spec, arguments.set, options, arguments.out, overwrite=arguments.overwrite)


# ---- models --------------------------------------------------------------------------------------------------------


def add_models(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("models", parents=[common], help="list the model families and decoders")
    command.set_defaults(command=_models)


def _models(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.catalog import print_catalog

    return print_catalog()


COMMANDS = (
    add_run,
    add_submit,
    add_stop,
    add_validate,
    add_status,
    add_logs,
    add_verify,
    add_rerun,
    add_compact,
    add_export,
    add_compare,
    add_report,
    add_sweep,
    add_measure,
    add_evaluate,
    add_list_runs,
    add_catchup,
    add_prune,
    add_manifest,
    add_models,
)
"""The commands, in the order in which `draftmill --help` lists them."""
