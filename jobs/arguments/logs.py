"""The options of `draftmill logs`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("logs", parents=[common], help="print what drivers and workers of a run noted")
    store_arguments(command)
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.add_argument("--follow", action="store_true", help="go on printing while a driver works on the run")
    command.set_defaults(command=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.logs import logs

    return logs(arguments.run_dir, as_json=arguments.json, follow=arguments.follow, s3=s3_options(arguments))
