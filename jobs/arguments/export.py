"""The options of `draftmill export`."""

from __future__ import annotations

import argparse

from draftmill.jobs.arguments.shared import Commands, s3_options, store_arguments


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("export", parents=[common], help="write a finished run's results to one file")
    store_arguments(command)
    command.add_argument("--format", required=True, choices=["openai", "jsonl", "csv", "parquet"])
    command.add_argument("--out", required=True, metavar="FILE", help="a file, s3://bucket/key, or - (standard output)")
    command.add_argument("--errors", metavar="FILE", help="separate file for samples that are not ok")
    command.add_argument("--columns", default="", metavar="A,B,...", help="columns of the result table (default: all)")
    command.add_argument(
        "--order",
        default="plan",
        choices=["plan", "input"],
        help="order of the rows: as planned, or as in the inputs (plan)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace existing files")
    command.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.exporting.export import export

    return export(
        arguments.run_dir,
        arguments.format,
        arguments.out,
        errors=arguments.errors,
        columns=[name for name in arguments.columns.split(",") if name],
        overwrite=arguments.overwrite,
        order=arguments.order,
        s3=s3_options(arguments),
    )
