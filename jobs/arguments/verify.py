"""The options of `draftmill verify`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, count, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("verify", parents=[common], help="check a run's promises from its files alone")
    store_arguments(command)
    command.add_argument("--invariance", type=count, default=0, metavar="N", help="decode N samples again, alone")
    command.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.verifying.verify import verify

    return verify(arguments.run_dir, s3=s3_options(arguments), invariance=arguments.invariance)
