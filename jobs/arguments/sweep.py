"""The options of `draftmill sweep`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, driver_arguments, run_options, set_argument


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "sweep", parents=[common], help="run several variants of a job on the same workers, or resume them; idempotent"
    )
    command.add_argument("sweep", metavar="SWEEP.yaml")
    command.add_argument("--dry-run", action="store_true", help="show the cases, their tokens and time; write nothing")
    set_argument(command)
    driver_arguments(command)
    command.set_defaults(command=_sweep, resumes=True)


def _sweep(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.sweeping.sweep import sweep

        return sweep(arguments.sweep, arguments.set, run_options(arguments), dry_run=arguments.dry_run)
