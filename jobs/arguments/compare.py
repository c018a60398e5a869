"""The options of `draftmill compare`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, baseline_argument, s3_arguments, s3_options


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("compare", parents=[common], help="compare finished runs of the same samples, paired")
    command.add_argument(
        "run_dirs",
        nargs="+",
        metavar="RUN_DIR",
        help="run directories, the first is the baseline; or a sweep's directory",
    )
    baseline_argument(command)
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", dest="form", action="store_const", const="json", help="all figures as JSON")
    forms.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="Markdown tables")
    s3_arguments(command)
    command.set_defaults(command=_compare, form="text")


def _compare(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.compare import compare

    return compare(arguments.run_dirs, form=arguments.form, baseline=arguments.baseline, s3=s3_options(arguments))
