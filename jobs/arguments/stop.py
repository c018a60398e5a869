"""The options of `draftmill stop`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, date_argument, s3_arguments, s3_options, seconds, set_argument
from draftmill.jobs.arguments.submit import address_argument


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
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
