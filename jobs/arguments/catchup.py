"""The options of `draftmill catchup`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import datetime

from draftmill.jobs.arguments.shared import Commands, driver_arguments, if_running_argument, run_options, spec_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
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
