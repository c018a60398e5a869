"""The options of `draftmill report`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, baseline_argument, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("report", parents=[common], help="write an HTML file with tables and plots of a run")
    store_arguments(command)
    command.add_argument("--out", required=True, metavar="FILE.html", help="the file to write")
    baseline_argument(command)
    command.add_argument("--overwrite", action="store_true", help="replace a file that is not a report")
    command.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.report import report

    return report(
        arguments.run_dir,
        arguments.out,
        baseline=arguments.baseline,
        overwrite=arguments.overwrite,
        s3=s3_options(arguments),
    )
