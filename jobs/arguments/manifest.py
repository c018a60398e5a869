"""The options of `draftmill manifest`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from draftmill.jobs.arguments.shared import Commands, count, spec_arguments

KINDS = ("rayjob", "raycronjob", "raycluster", "cronjob", "slurm", "cron", "systemd", "ray-up")


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "manifest",
        parents=[common],
        help="write a file that runs the job on Kubernetes, Slurm, cron, systemd or Ray's launcher",
        description="Prints a file that runs the job elsewhere or on a schedule. Each option says to which kinds it applies.",
    )
    spec_arguments(command)
    command.add_argument("--for", dest="kind", required=True, choices=KINDS, help="who runs the job")
    command.add_argument("--out", metavar="FILE", help="write to a file, or to a folder; default: print")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")
    _job_options(command)
    _size_options(command)
    _kubernetes_options(command)
    _machine_options(command)
    command.set_defaults(command=_manifest)


def _job_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", help="name of the job there; default: from the spec's name")
    command.add_argument("--logical-date", metavar="DATE", help="rayjob with a date in output.path; default: now (UTC)")
    command.add_argument("--schedule", metavar="CRON", help="'minute hour day month weekday'; default: '0 3 * * *'")
    command.add_argument("--time-zone", metavar="ZONE", help="raycronjob, cronjob, systemd: for example Europe/Berlin")
    command.add_argument("--time-limit", metavar="TIME", help="of one run, like 12h; default: 24h. Not for ray-up")
    command.add_argument(
        "--retries", type=count, metavar="N", help="starts after a run that did not finish; default: 3"
    )
    command.add_argument("--auth", metavar="MODE", help="RAY_AUTH_MODE: token (the default) or disabled")
    command.add_argument(
        "--secret",
        metavar="NAME",
        help="credentials by reference: a Kubernetes Secret; elsewhere a file of KEY=VALUE lines",
    )


def _size_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "nodes (rayjob, raycronjob, raycluster, slurm; default: from the spec's workers)"
    )
    group.add_argument("--nodes", type=count, metavar="N", help="nodes with workers; also ray-up")
    group.add_argument(
        "--max-nodes", type=count, metavar="N", help="let the autoscaler add nodes; also ray-up, not slurm"
    )
    group.add_argument("--cpus-per-node", type=count, metavar="N")
    group.add_argument("--gpus-per-node", type=count, metavar="N")
    group.add_argument("--memory-per-node", metavar="SIZE", help="default: 8Gi")


def _kubernetes_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("Kubernetes (rayjob, raycronjob, raycluster, cronjob)")
    group.add_argument("--image", help="image of draftmill; also ray-up; default: draftmill:0.1.0")
    group.add_argument("--namespace", metavar="NAME")
    group.add_argument("--service-account", metavar="NAME", help="with the right to S3, so that no Secret is needed")
    group.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:FOLDER",
        help="mount a persistent volume claim everywhere",
    )
    group.add_argument("--ray-cluster", metavar="NAME", help="cronjob: the RayCluster that runs the job")


def _machine_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("machines")
    group.add_argument(
        "--shared-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder that all nodes see, so that specs may use it",
    )
    group.add_argument(
        "--head-address",
        metavar="ADDR",
        help="cronjob, cron, systemd: a Ray cluster's address; ray-up: the head machine",
    )
    group.add_argument("--worker-address", action="append", default=[], metavar="ADDR", help="ray-up: a worker machine")
    group.add_argument("--ssh-user", metavar="USER", help="ray-up; default: ubuntu")
    group.add_argument("--region", help="ray-up on AWS; default: us-west-2")
    group.add_argument("--instance-type", metavar="TYPE", help="ray-up on AWS: machines of the workers")
    group.add_argument("--account", help="slurm")
    group.add_argument("--partition", help="slurm")
    group.add_argument("--user", help="cron: write an entry for /etc/cron.d; systemd: who runs the job")
    group.add_argument("--program", metavar="PATH", help="slurm, cron, systemd: draftmill's path; default: this one")
    group.add_argument("--directory", metavar="PATH", help="slurm, cron, systemd: working directory; default: this one")


def _manifest(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.manifests.options import Options
    from draftmill.jobs.manifests.write import manifest

    given: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = Options(**given)
    return manifest(arguments.spec, arguments.set, options, arguments.out, overwrite=arguments.overwrite)
