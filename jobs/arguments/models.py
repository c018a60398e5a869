"""The options of `draftmill models`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("models", parents=[common], help="list the model families and decoders")
    command.set_defaults(command=_models)


def _models(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.catalog import print_catalog

    return print_catalog()
