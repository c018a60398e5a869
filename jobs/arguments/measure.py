"""The options of `draftmill measure`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, driver_arguments, run_options, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("measure", parents=[common], help="measure metrics on a finished run's results")
    store_arguments(command)
    command.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME",
        help="a metric (exact_match, rouge, pass@1, ...), a Python file of your own, or '{kind: ..., ...}'",
    )
    command.add_argument("--reference", metavar="COLUMN", help="kept column with the references")
    command.add_argument(
        "--allow-code-execution", action="store_true", help="let pass@k run code that a model wrote, in a sandbox"
    )
    driver_arguments(command)
    command.set_defaults(command=_measure, resumes=True)


def _measure(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.measure import measure

        return measure(
            arguments.run_dir,
            arguments.metric,
            run_options(arguments),
            allow_code_execution=arguments.allow_code_execution,
            reference=arguments.reference,
            s3=s3_options(arguments),
        )
