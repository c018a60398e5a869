"""`draftmill manifest`: a file that runs the job elsewhere or on a schedule, printed, or written to a file or folder.

Kubernetes (KubeRay's RayJob and RayCluster, Kubernetes' own CronJob), a Slurm script and a crontab entry. The templates are in
infra/manifests; here is what they are filled with.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftmill.jobs.config.dates import format_date, read_date
from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.remote.manifest_job import (
    GRACE_S,
    KILL_S,
    Job,
    Shape,
    check_folder,
    local_places,
    on_s3,
    one_shape,
    read_job,
    refuse_node_local,
    refuse_unseen,
    shapes_of,
    spec_text,
)
from draftmill.jobs.remote.manifest_options import OWN_CLUSTER, Options, option_name, size_bytes
from draftmill.jobs.remote.templates import crontab, fill_template
from draftmill.storage.errors import UserError

USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""
MAX_CRON_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""

ON_ALL_NODES = "a folder that all nodes of the cluster share, as an absolute path (--shared-path FOLDER)"


def manifest(spec: str, overrides: Sequence[str], options: Options, out: str | None, *, overwrite: bool = False) -> int:
    """Print or write the manifest; returns 0. UserError if the spec, an option or the place to write is unusable."""
    job = read_job(spec, overrides, options)
    text = MAKERS[options.kind](job)
    if out is None:
        sys.stdout.write(text)
        return OK
    path = Path(out)
    if path.is_dir() or out.endswith("/"):
        path /= f"{job.name}.{ENDINGS.get(options.kind, 'yaml')}"
    _write(path, text, overwrite=overwrite)
    return OK


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{os.fspath(path)!r} exists; allowed: another path, or --overwrite", field="--out") from None
    except OSError as error:
        raise UserError(f"{os.fspath(path)!r}: {error.strerror or error}", field="--out") from None
    print(f"wrote {path}")


def _fill(template: str, job: Job, **facts: Any) -> str:
    return fill_template(template, name=job.name, options=job.options, dated=job.dated, **facts)


def _shared_folders(job: Job) -> list[str]:
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


def with_cluster(job: Job) -> str:
    """A RayJob or RayCluster."""
    facts, shapes = _facts(job, IN_A_VOLUME), shapes_of(job)
    names = ["decode"] if len(shapes) == 1 else [f"decode-{index}" for index in range(len(shapes))]
    groups = [
        {"name": name, "shape": shape, "resources": _resources(shape)}
        for name, shape in zip(names, shapes, strict=True)
    ]
    given = job.options.logical_date
    date = [] if given is None else ["--logical-date", format_date(read_date(given))]
    facts |= {
        "ray_version": version("ray"),
        "head_resources": {"cpu": "2", "memory": "4Gi"},
        "groups": groups,
        "grows": any(shape.most_nodes > shape.nodes for shape in shapes),
        "command": [*RUN_COMMAND, *date],
    }
    return _fill(f"{job.options.kind}.yaml.j2", job, **facts)


def cronjob(job: Job) -> str:
    """A CronJob, which submits to a cluster that is there."""
    facts = _facts(job, IN_A_CLUSTER)
    cluster = job.options.ray_cluster or DEFAULT_CLUSTER
    address = _address(job, cluster)
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


def _facts(job: Job, allowed: str) -> dict[str, Any]:
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


def _claims(job: Job) -> list[tuple[str, str]]:
    claims = []
    for given in job.options.volume:
        claim, colon, folder = given.partition(":")
        if not colon or not claim.replace("-", "").replace(".", "").isalnum() or claim != claim.lower():
            raise UserError(
                f"{given!r} is not allowed; allowed: CLAIM:FOLDER, like results:/data", field=option_name("volume")
            )
        claims.append((claim, check_folder(folder, option_name("volume"))))
    return claims


def _secret(job: Job) -> str | None:
    """The Secret with S3 credentials; none is needed where nothing is on S3, or a service account has the rights."""
    if job.options.secret is not None:
        return job.options.secret
    needs = on_s3(job.spec) and job.options.kind in OWN_CLUSTER and job.options.service_account is None
    return DEFAULT_SECRET if needs else None


def _resources(shape: Shape) -> dict[str, str]:
    gpus = {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else {}
    return {"cpu": str(shape.cpus), "memory": shape.memory} | gpus


def _address(job: Job, cluster: str) -> str:
    if job.options.head_address is None:
        return f"http://{cluster}-head-svc:8265"
    if job.options.ray_cluster is not None:
        raise UserError(
            "--ray-cluster gives the address, too; allowed: only one of the two options", field="--head-address"
        )
    address = job.options.head_address
    return address if "://" in address else f"http://{address}"


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(job: Job) -> str:
    """A batch script: Ray over the nodes of the job, the driver on the first of them, and a requeue where it helps."""
    shape = one_shape(job)
    if shape.nodes > 1:
        places = [("SPEC.yaml", job.path), ("--directory", job.directory), ("--program", job.program)]
        refuse_node_local([*places, *local_places(job.spec)], job.directory, _shared_folders(job))
    days, rest = divmod(job.options.limit_s, 86400)
    command = [job.program, "run", job.path, *job.sets(), "--if-running", "skip", "--grace-seconds", str(GRACE_S)]
    return _fill(
        "slurm.sh.j2",
        job,
        shape=shape,
        memory_mib=math.ceil(size_bytes(shape.memory) / 2**20),
        time_limit=f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}",
        usr1_s=USR1_S,
        directory=job.directory,
        program_folder=os.path.dirname(job.program),
        command=command,
        over=(OK, *FINAL),
    )


# ---- cron ------------------------------------------------------------------------------------------------------------


def cron(job: Job) -> str:
    """A line for cron, with the settings that cron's almost empty environment lacks."""
    _check_places(job)
    secret = f"set -a; . {crontab([job.options.secret])}; set +a; " if job.options.secret else ""
    limited = ["timeout", "--signal=TERM", f"--kill-after={KILL_S}", str(job.options.limit_s)]
    log = crontab([posixpath.join(job.directory, f"{job.name}.log")])
    words = crontab([*limited, *_run_words(job), "--quiet", "--grace-seconds", str(GRACE_S)])
    command = f"cd {crontab([job.directory])} && {secret}exec {words} >> {log} 2>&1"
    if len(command.encode()) > MAX_CRON_COMMAND:
        raise UserError(
            f"the command would have {len(command.encode()):,} bytes, and cron's limit is {MAX_CRON_COMMAND}; allowed: "
            "shorter paths, or settings in the spec instead of --set",
            field="SPEC.yaml",
        )
    return _fill("cron.j2", job, command=command, grace_s=GRACE_S, kill_s=KILL_S)


def _check_places(job: Job) -> None:
    """Refuse paths that the nodes of another cluster can't see; on one machine all can be seen."""
    if job.options.head_address is not None:
        refuse_unseen(job.spec, _shared_folders(job), allowed=ON_ALL_NODES)


def _run_words(job: Job) -> list[str]:
    words, address = [job.program, "run", job.path, *job.sets(), "--if-running", "skip"], job.options.head_address
    if address is None:
        return words
    if not re.fullmatch(r"[A-Za-z0-9_.\[\]:-]+:\d{1,5}", address):
        raise UserError(
            f"{address!r} is not allowed; allowed: HOST:PORT of the cluster's head, like 10.0.0.1:6379",
            field="--head-address",
        )
    return [*words, "--ray-address", address]


MAKERS: Mapping[str, Callable[[Job], str]] = {
    "rayjob": with_cluster,
    "raycluster": with_cluster,
    "cronjob": cronjob,
    "slurm": slurm,
    "cron": cron,
}
ENDINGS = {"slurm": "sh", "cron": "cron"}
"""Of the files' names; else yaml."""
