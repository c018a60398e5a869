"""The commands of draftmill: arguments in, exit code out. No logic lives here.

Exit codes: 0 finished within the error threshold; 2 the spec, the input or the run directory is unusable; 3 finished, but
more samples failed than allowed; 4 interrupted, resumable; 1 anything unexpected.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jobs.codes import INTERRUPTED, UNEXPECTED, UNUSABLE
from jobs.harness.options import REFUSED, SEEDS, EvalOptions, documents, named, seeds
from storage.errors import DamagedRun, StoreError, UserError
from storage.secrets import presentable
from storage.stores.verbs import S3Options

if TYPE_CHECKING:
    from jobs.commands.run import RunOptions

COLLECT_AFTER = 100_000
"""Objects allocated between two garbage collections: with Python's default, 700, these take a tenth of the import time."""

GRACE_VARIABLE = "DRAFTMILL_GRACE_SECONDS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors go to stderr as one line, with a traceback only under --debug."""
    arguments = parser().parse_args(argv)
    gc.set_threshold(COLLECT_AFTER)
    try:
        return int(arguments.command(arguments))
    except (UserError, DamagedRun) as error:
        return _complain(arguments, error, UNUSABLE)
    except StoreError as error:
        return _complain(arguments, error, UNEXPECTED)
    except KeyboardInterrupt:
        resumes = arguments.command in {_run, _rerun, _sweep, _eval}  # the other commands leave nothing to resume
        print(f"draftmill: interrupted{'; run it again to resume' if resumes else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has exited, as `| head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return UNEXPECTED
    except Exception as error:  # noqa: BLE001 - the user gets one line for any error
        return _complain(arguments, error, UNEXPECTED)


def _complain(arguments: argparse.Namespace, error: Exception, code: int) -> int:
    if arguments.debug:
        raise error
    kind = "" if isinstance(error, UserError | StoreError) else f"unexpected {type(error).__name__}: "
    hint = "" if isinstance(error, UserError | DamagedRun) else " (--debug shows where)"
    print(presentable(f"draftmill: {kind}{error}{hint}"), file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = argparse.ArgumentParser(prog="draftmill", description="Batch generation, lossless, resumable, exactly once.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_run, _add_validate, _add_status, _add_verify, _add_rerun, _add_compact, _add_export,
        _add_compare, _add_report, _add_sweep, _add_measure, _add_eval, _add_models,
    ):  # fmt: skip
        add(commands, common)
    return top


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _spec_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC.yaml")
    _set_argument(command)


def _set_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key: a.b=VALUE")


def _add_run(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("run", parents=[common], help="run a job, or resume it; idempotent")
    _spec_arguments(command)
    _driver_arguments(command)
    command.set_defaults(command=_run)


def _driver_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ray-address", metavar="ADDR", help="a running Ray cluster; default: start Ray on this machine"
    )
    command.add_argument("--local", action="store_true", help="one worker in this process, without Ray: for small jobs")
    command.add_argument("--quiet", action="store_true", help="no progress")
    grace_s = os.environ.get(GRACE_VARIABLE, "30")  # a string, so that argparse checks it like the option
    command.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=grace_s,
        metavar="S",
        help="time from SIGTERM to the end; running units may continue until 5 s before it",
    )


def _add_validate(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("validate", parents=[common], help="dry run: check the spec, show the first canvas")
    _spec_arguments(command)
    command.set_defaults(command=_validate)


def _store_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", metavar="RUN_DIR", help="a folder or s3://bucket/prefix")
    _s3_arguments(command)


def _s3_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--s3-endpoint", metavar="URL", help="endpoint of an S3 service other than Amazon's")
    command.add_argument("--s3-region", metavar="REGION")
    command.add_argument("--s3-addressing", default="auto", choices=["auto", "path", "virtual"])
    command.add_argument("--s3-checksums", default="auto", choices=["auto", "when_required", "when_supported"])


def _add_status(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("status", parents=[common], help="show the progress of a run")
    _store_arguments(command)
    command.set_defaults(command=_status)


def _add_measure(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("measure", parents=[common], help="measure metrics on a finished run's results")
    _store_arguments(command)
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
    _driver_arguments(command)
    command.set_defaults(command=_measure)


def _add_verify(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("verify", parents=[common], help="check a run's promises from its files alone")
    _store_arguments(command)
    command.add_argument("--invariance", type=_count, default=0, metavar="N", help="decode N samples again, alone")
    command.set_defaults(command=_verify)


def _add_rerun(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("rerun", parents=[common], help="decode the failed samples again, as a new pass")
    _store_arguments(command)
    command.add_argument("--failed", action="store_true", required=True, help="samples whose status is failed")
    _set_argument(command)
    _driver_arguments(command)
    command.set_defaults(command=_rerun)


def _add_compact(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "compact", parents=[common], help="rewrite a finished run's results into files of a chosen size"
    )
    _store_arguments(command)
    command.add_argument("--file-mb", type=_megabytes, default=128, metavar="N", help="maximum file size in MiB (128)")
    command.set_defaults(command=_compact)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number from 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number from 0")
    return int(text)


def _megabytes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 to 4096")
    return int(text)


def _add_export(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("export", parents=[common], help="write a finished run's results to one file")
    _store_arguments(command)
    command.add_argument("--format", required=True, choices=["openai", "jsonl", "csv", "parquet"])
    command.add_argument("--out", required=True, metavar="FILE", help="a file, s3://bucket/key, or - (standard output)")
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


def _add_compare(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("compare", parents=[common], help="compare finished runs of the same samples, paired")
    command.add_argument(
        "run_dirs",
        nargs="+",
        metavar="RUN_DIR",
        help="run directories, the first is the baseline; or a sweep's directory",
    )
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="all figures as JSON")
    forms.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="Markdown tables")
    _s3_arguments(command)
    command.set_defaults(command=_compare, form="text")


def _add_report(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("report", parents=[common], help="write an HTML file with tables and plots of a run")
    _store_arguments(command)
    command.add_argument("--out", required=True, metavar="FILE.html", help="the file to write")
    command.add_argument("--overwrite", action="store_true", help="replace a file that is not a report")
    command.set_defaults(command=_report)


def _add_sweep(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "sweep", parents=[common], help="run several variants of a job on the same workers, or resume them; idempotent"
    )
    command.add_argument("sweep", metavar="SWEEP.yaml")
    command.add_argument("--dry-run", action="store_true", help="show the cases, their tokens and time; write nothing")
    _set_argument(command)
    _driver_arguments(command)
    command.set_defaults(command=_sweep)


def _add_models(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser("models", parents=[common], help="list the model families and decoders")
    command.set_defaults(command=_models)


def _run(arguments: argparse.Namespace) -> int:
    from jobs.driving.driver import interruptible

    with interruptible():  # the imports take a while, too
        from jobs.commands.run import run_job
        from jobs.spec.job_spec import load_spec

        return run_job(load_spec(arguments.spec, arguments.set), _options(arguments))


def _options(arguments: argparse.Namespace) -> RunOptions:
    from jobs.commands.run import RunOptions

    if arguments.local and arguments.ray_address is not None:
        raise UserError("--local runs without Ray; allowed: only one of the two options", field="--ray-address")
    return RunOptions(arguments.ray_address, arguments.local, arguments.quiet, arguments.grace_seconds)


def _sweep(arguments: argparse.Namespace) -> int:
    from jobs.driving.driver import interruptible

    with interruptible():
        from jobs.commands.sweep import sweep

        return sweep(arguments.sweep, arguments.set, _options(arguments), dry_run=arguments.dry_run)


def _rerun(arguments: argparse.Namespace) -> int:
    from jobs.driving.driver import interruptible

    with interruptible():
        from jobs.commands.rerun import rerun

        return rerun(arguments.run_dir, _options(arguments), overrides=arguments.set, s3=_s3(arguments))


def _validate(arguments: argparse.Namespace) -> int:
    from jobs.commands.validate import validate
    from jobs.spec.job_spec import load_spec

    return validate(load_spec(arguments.spec, arguments.set))


def _status(arguments: argparse.Namespace) -> int:
    from jobs.commands.status import status

    return status(arguments.run_dir, s3=_s3(arguments))


def _measure(arguments: argparse.Namespace) -> int:
    from jobs.driving.driver import interruptible

    with interruptible():
        from jobs.commands.measure import measure

        return measure(
            arguments.run_dir,
            arguments.metric,
            _options(arguments),
            allow_code_execution=arguments.allow_code_execution,
            reference=arguments.reference,
            s3=_s3(arguments),
        )


def _verify(arguments: argparse.Namespace) -> int:
    from jobs.commands.verify import verify

    return verify(arguments.run_dir, s3=_s3(arguments), invariance=arguments.invariance)


def _compact(arguments: argparse.Namespace) -> int:
    from jobs.commands.compact import compact

    return compact(arguments.run_dir, file_mb=arguments.file_mb, s3=_s3(arguments))


def _export(arguments: argparse.Namespace) -> int:
    from jobs.commands.export import export

    return export(
        arguments.run_dir,
        arguments.format,
        arguments.out,
        errors=arguments.errors,
        columns=[name for name in arguments.columns.split(",") if name],
        overwrite=arguments.overwrite,
        order=arguments.order,
        s3=_s3(arguments),
    )


def _compare(arguments: argparse.Namespace) -> int:
    from jobs.commands.compare import compare

    return compare(arguments.run_dirs, form=arguments.form, s3=_s3(arguments))


def _report(arguments: argparse.Namespace) -> int:
    from jobs.commands.report import report

    return report(arguments.run_dir, arguments.out, overwrite=arguments.overwrite, s3=_s3(arguments))


def _models(arguments: argparse.Namespace) -> int:
    from jobs.commands.catalog import print_catalog

    return print_catalog()


def _s3(arguments: argparse.Namespace) -> S3Options:
    return S3Options(arguments.s3_endpoint, arguments.s3_region, arguments.s3_addressing, arguments.s3_checksums)


# ---- eval: options of lm-evaluation-harness


def _add_eval(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "eval",
        parents=[common],
        allow_abbrev=False,
        help="run lm-evaluation-harness's tasks with a spec's model and decoder, or resume that",
    )
    _spec_arguments(command)
    _driver_arguments(command)
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
    command.set_defaults(command=_eval)


class _Refused(argparse.Action):
    """An option that is known and not supported, with the reason."""

    def __init__(self, *, reason: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]}: {self._reason}")


def _eval(arguments: argparse.Namespace) -> int:
    from jobs.driving.driver import interruptible

    with interruptible():
        from jobs.commands.evaluate import evaluate

        return evaluate(arguments.spec, arguments.set, _eval_options(arguments), _options(arguments))


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


if __name__ == "__main__":
    sys.exit(main())
