"""Options that several commands share, and their values as the commands take them."""

from __future__ import annotations

import argparse
import math
import os
from typing import TYPE_CHECKING, TypeAlias

from draftmill.storage.errors import UserError
from draftmill.storage.stores.verbs import S3Options

if TYPE_CHECKING:
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
