"""The options of `draftmill rerun`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import (
    Commands,
    driver_arguments,
    run_options,
    s3_options,
    set_argument,
    store_arguments,
)


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("rerun", parents=[common], help="decode the failed samples again, as a new pass")
    store_arguments(command)
    command.add_argument("--failed", action="store_true", required=True, help="samples whose status is failed")
    set_argument(command)
    driver_arguments(command)
    command.set_defaults(command=_rerun, resumes=True)


def _rerun(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.rerun import rerun

        return rerun(arguments.run_dir, run_options(arguments), overrides=arguments.set, s3=s3_options(arguments))
