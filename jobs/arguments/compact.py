"""The options of `draftmill compact`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, megabytes, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "compact", parents=[common], help="rewrite a finished run's results into files of a chosen size"
    )
    store_arguments(command)
    command.add_argument("--file-mb", type=megabytes, default=128, metavar="N", help="maximum file size in MiB (128)")
    command.set_defaults(command=_compact)


def _compact(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.exporting.compact import compact

    return compact(arguments.run_dir, file_mb=arguments.file_mb, s3=s3_options(arguments))
