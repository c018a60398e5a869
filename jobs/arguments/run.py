"""The options of `draftmill run`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from draftmill.jobs.arguments.shared import (
    Commands,
    date_argument,
    dated_spec,
    driver_arguments,
    if_running_argument,
    run_options,
    spec_arguments,
)


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser("run", parents=[common], help="run a job, or resume it; idempotent")
    spec_arguments(command)
    driver_arguments(command)
    date_argument(command)
    if_running_argument(command)
    command.set_defaults(command=_run, resumes=True)


def _run(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():  # the imports take a while, too
        from draftmill.jobs.running.run import run_job
        from draftmill.jobs.spec.job_spec import load_spec

        spec = dated_spec(load_spec(arguments.spec, arguments.set), arguments.logical_date)
        return run_job(spec, replace(run_options(arguments), if_running=arguments.if_running))
