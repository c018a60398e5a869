"""The options of `draftmill status`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("status", parents=[common], help="show the progress of a run")
    store_arguments(command)
    command.set_defaults(command=_status)


def _status(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.status import status

    return status(arguments.run_dir, s3=s3_options(arguments))
