"""The options of `draftmill prune`."""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from typing import TYPE_CHECKING

from draftmill.jobs.arguments.shared import Commands, s3_arguments, s3_options

if TYPE_CHECKING:
    from draftmill.jobs.recurring.pruning import Keep

DAYS = {"d": 1, "w": 7}
"""Days in each unit of an age."""


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
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
