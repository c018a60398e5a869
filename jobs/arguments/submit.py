"""The options of `draftmill submit`."""

from __future__ import annotations

import argparse
import os

from draftmill.jobs.arguments.shared import GRACE_VARIABLE, Commands, date_argument, seconds, spec_arguments

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "submit", parents=[common], help="run a job on a cluster through Ray's job API, and follow it; idempotent"
    )
    spec_arguments(command)
    address_argument(command)
    date_argument(command)
    command.add_argument(
        "--if-running",
        default="fail",
        choices=["skip", "wait", "fail"],
        help="as for `run`: another driver has the run",
    )
    command.add_argument("--no-wait", action="store_true", help="print the job's name and return")
    command.add_argument(
        "--code", choices=["ship", "installed"], help="ship draftmill's code, or use the cluster's (ship)"
    )
    command.add_argument("--working-dir", metavar="FOLDER", help="a folder that the job needs: rows, models, metrics")
    command.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave out files, as in .gitignore"
    )
    command.add_argument(
        "--shared", action="append", default=[], metavar="FOLDER", help="a folder that all nodes have under this name"
    )
    command.add_argument("--image", metavar="IMAGE", help="container image with draftmill; the nodes need podman")
    command.add_argument("--pip", action="append", default=[], metavar="REQUIREMENT", help="install with pip first")
    command.add_argument("--requirements", action="append", default=[], metavar="FILE", help="a file of requirements")
    command.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the job; no secrets"
    )
    command.add_argument("--driver-cpus", type=seconds, default=0.0, metavar="N", help="run the driver on any node")
    command.add_argument(
        "--grace-seconds",
        type=seconds,
        default=os.environ.get(GRACE_VARIABLE, "30"),
        metavar="S",
        help="time from a stop to the driver's end by itself; after 15 s more it is killed",
    )
    command.set_defaults(command=_submit, follows=True)


def address_argument(command: argparse.ArgumentParser, default: str = f"${ADDRESS_VARIABLE}") -> None:
    """Add the cluster's address; `default` says what happens without it."""
    command.add_argument(
        "--address", metavar="URL", help=f"the cluster's dashboard, http://HOST:8265; default: {default}"
    )


def _submit(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.commands.submit import address_of, submit
    from draftmill.jobs.submitting.request import Wishes, requirements

    address = address_of(arguments.address, os.environ.get(ADDRESS_VARIABLE))
    wishes = Wishes(
        code=arguments.code,
        working_dir=arguments.working_dir,
        excludes=tuple(arguments.exclude),
        shared=tuple(arguments.shared),
        image=arguments.image,
        pip=(*arguments.pip, *requirements(arguments.requirements)),
        env=tuple(arguments.env),
        grace_s=arguments.grace_seconds,
        driver_cpus=arguments.driver_cpus,
        run=("--if-running", arguments.if_running),
    )
    return submit(
        arguments.spec,
        arguments.set,
        address,
        wishes,
        logical_date=arguments.logical_date,
        wait=not arguments.no_wait,
    )
