"""The options of `draftmill list`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, s3_arguments, s3_options


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("list", parents=[common], help="list the runs below a folder, with their state")
    command.add_argument("folder", metavar="DIR", help="a folder or s3://bucket/prefix")
    command.add_argument("--json", dest="as_json", action="store_true", help="all facts as JSON")
    s3_arguments(command)
    command.set_defaults(command=_list)


def _list(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.list_runs import list_runs

    return list_runs(arguments.folder, as_json=arguments.as_json, s3=s3_options(arguments))
