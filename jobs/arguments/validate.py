"""The options of `draftmill validate`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, date_argument, dated_spec, spec_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("validate", parents=[common], help="dry run: check the spec, show the first canvas")
    spec_arguments(command)
    date_argument(command)
    command.set_defaults(command=_validate)


def _validate(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.validate import validate
    from draftmill.jobs.spec.job_spec import load_spec

    return validate(dated_spec(load_spec(arguments.spec, arguments.set), arguments.logical_date))
