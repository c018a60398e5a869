"""`draftmill manifest` prints a file that runs the job elsewhere or on a schedule.

Kubernetes (KubeRay's RayJob and RayCluster, Kubernetes' own CronJob), a Slurm script and a crontab entry. The templates are in
infra/manifests; here is what they are filled with.
"""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.remote.manifest_job import (
    GRACE_S,
    KILL_S,
    OWN_CLUSTER,
    ManifestJob,
    NodeShape,
    Options,
    check_folder,
    local_places,
    on_s3,
    one_shape,
    option_name,
    read_job,
    refuse_node_local,
    refuse_unseen,
    shapes_of,
    spec_text,
)
from draftmill.jobs.remote.templates import crontab, fill_template
from draftmill.storage.errors import UserError

USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""
MAX_CRON_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""

MEMORY_GIB = 8
"""Of a node. It is a line of the file, as are LIMIT_S and RETRIES."""
LIMIT_S = 86400
"""Seconds after which a run is stopped."""
RETRIES = 3
"""How often a run that did not finish is started again."""


def manifest(spec: str, overrides: Sequence[str], options: Options) -> int:
    """Print the manifest; returns 0. UserError if the spec or an option is unusable."""
    sys.stdout.write(MAKERS[options.kind](read_job(spec, overrides, options)))
    return OK


def _fill(template: str, job: ManifestJob, **facts: Any) -> str:
    facts |= {"limit_s": LIMIT_S, "retries": RETRIES}
    return fill_template(template, name=job.name, options=job.options, dated=job.dated, **facts)


def _shared_folders(job: ManifestJob) -> list[str]:
    return [check_folder(path, "--shared-path") for path in job.options.shared_path]


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

FOLDER = "/etc/draftmill"
SPEC_FILE = f"{FOLDER}/spec.yaml"
DEFAULT_IMAGE = "draftmill:0.1.0"
DEFAULT_SECRET = "draftmill-s3"
DEFAULT_CLUSTER = "draftmill"

RUN_COMMAND = ["draftmill", "run", SPEC_FILE, "--ray-address", "auto", "--if-running", "skip"]
"""The driver's command. Its words need no quotes: KubeRay and Ray each pass it through a shell."""

IN_A_CLUSTER = "an absolute path in a folder that the cluster's pods all have (--shared-path FOLDER)"
IN_A_VOLUME = (
    "an absolute path in a volume that all pods mount (--volume CLAIM:FOLDER), or in the image (--shared-path FOLDER)"
)


def with_cluster(job: ManifestJob) -> str:
    """A RayJob or RayCluster."""
    facts, shapes = _facts(job, IN_A_VOLUME), shapes_of(job)
    names = ["decode"] if len(shapes) == 1 else [f"decode-{index}" for index in range(len(shapes))]
    groups = [
        {"name": name, "shape": shape, "resources": _resources(shape)}
        for name, shape in zip(names, shapes, strict=True)
    ]
    facts |= {
        "ray_version": version("ray"),
        "head_resources": {"cpu": "2", "memory": "4Gi"},
        "groups": groups,
        "command": RUN_COMMAND,
    }
    return _fill(f"{job.options.kind}.yaml.j2", job, **facts)


def cronjob(job: ManifestJob) -> str:
    """A CronJob, which submits to a cluster that is there."""
    facts = _facts(job, IN_A_CLUSTER)
    cluster = job.options.ray_cluster or DEFAULT_CLUSTER
    address = f"http://{cluster}-head-svc:8265"
    command = ["draftmill", "submit", SPEC_FILE, "--address", address, "--code", "installed"]
    command += [word for folder in job.options.shared_path for word in ("--shared", folder)]
    command += ["--grace-seconds", str(GRACE_S), "--if-running", "skip"]
    if job.dated:
        facts["script"] = fill_template("cronjob-run.sh.j2", command=command)
        command = ["bash", f"{FOLDER}/run.sh"]
    resources = {"cpu": "500m", "memory": "1Gi"}
    return _fill(
        "cronjob.yaml.j2", job, **facts, ray_cluster=cluster, address=address, command=command, resources=resources
    )


def _facts(job: ManifestJob, allowed: str) -> dict[str, Any]:
    """What all of them name; UserError for a path of this machine, which no pod has."""
    claims = _claims(job)
    refuse_unseen(job.spec, [*_shared_folders(job), *(folder for _, folder in claims)], allowed=allowed)
    return {
        "image": job.options.image or DEFAULT_IMAGE,
        "secret": _secret(job),
        "claims": claims,
        "folder": FOLDER,
        "spec_text": "" if job.options.kind == "raycluster" else spec_text(job),
        "script": "",
        "grace_s": GRACE_S,
        "kill_s": KILL_S,
        "final": FINAL,
    }


def _claims(job: ManifestJob) -> list[tuple[str, str]]:
    claims = []
    for given in job.options.volume:
        claim, colon, folder = given.partition(":")
        if not colon or not claim.replace("-", "").replace(".", "").isalnum() or claim != claim.lower():
            raise UserError(
                f"{given!r} is not allowed; allowed: CLAIM:FOLDER, like results:/data", field=option_name("volume")
            )
        claims.append((claim, check_folder(folder, option_name("volume"))))
    return claims


def _secret(job: ManifestJob) -> str | None:
    """The Secret with S3 credentials; none is needed where nothing is on S3, or a service account has the rights."""
    if job.options.secret is not None:
        return job.options.secret
    needs = on_s3(job.spec) and job.options.kind in OWN_CLUSTER and job.options.service_account is None
    return DEFAULT_SECRET if needs else None


def _resources(shape: NodeShape) -> dict[str, str]:
    gpus = {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else {}
    return {"cpu": str(shape.cpus), "memory": f"{MEMORY_GIB}Gi"} | gpus


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(job: ManifestJob) -> str:
    """A batch script: Ray over the nodes of the job, the driver on the first of them, and a requeue where it helps."""
    shape = one_shape(job)
    if shape.nodes > 1:
        places = [("SPEC.yaml", job.path), ("the working directory", os.getcwd()), ("draftmill", job.program)]
        refuse_node_local([*places, *local_places(job.spec)], os.getcwd(), _shared_folders(job))
    command = [job.program, "run", job.path, *job.sets(), "--if-running", "skip", "--grace-seconds", str(GRACE_S)]
    return _fill(
        "slurm.sh.j2",
        job,
        shape=shape,
        memory_gib=MEMORY_GIB,
        usr1_s=USR1_S,
        directory=os.getcwd(),
        program_folder=os.path.dirname(job.program),
        command=command,
        over=(OK, *FINAL),
    )


# ---- cron ------------------------------------------------------------------------------------------------------------


def cron(job: ManifestJob) -> str:
    """A line for cron, with the settings that cron's almost empty environment lacks."""
    directory = os.getcwd()
    secret = f"set -a; . {crontab([job.options.secret])}; set +a; " if job.options.secret else ""
    limited = ["timeout", "--signal=TERM", f"--kill-after={KILL_S}", str(LIMIT_S)]
    log = crontab([posixpath.join(directory, f"{job.name}.log")])
    run = [job.program, "run", job.path, *job.sets(), "--if-running", "skip", "--quiet"]
    words = crontab([*limited, *run, "--grace-seconds", str(GRACE_S)])
    command = f"cd {crontab([directory])} && {secret}exec {words} >> {log} 2>&1"
    if len(command.encode()) > MAX_CRON_COMMAND:
        raise UserError(
            f"the command would have {len(command.encode()):,} bytes, and cron's limit is {MAX_CRON_COMMAND}; allowed: "
            "shorter paths, or settings in the spec instead of --set",
            field="SPEC.yaml",
        )
    return _fill("cron.j2", job, command=command, grace_s=GRACE_S, kill_s=KILL_S)


MAKERS: Mapping[str, Callable[[ManifestJob], str]] = {
    "rayjob": with_cluster,
    "raycluster": with_cluster,
    "cronjob": cronjob,
    "slurm": slurm,
    "cron": cron,
}
