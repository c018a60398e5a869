"""`draftmill manifest`: a file that runs the job elsewhere or on a schedule, printed, or written to a file or folder.

Kubernetes (KubeRay's RayJob, RayCronJob and RayCluster, Kubernetes' own CronJob), a Slurm script, cron, systemd, and a file for
`ray up`. The templates are in infra/manifests; here is what they are filled with.
"""

from __future__ import annotations

import math
import os
import posixpath
import pwd
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.manifests.job import (
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
from draftmill.jobs.manifests.options import OWN_CLUSTER, Options, option_name, size_bytes
from draftmill.jobs.manifests.templates import check_printable, crontab, fill_template, systemd, systemd_path
from draftmill.jobs.spec.dated_path import format_date, read_date
from draftmill.storage.errors import UserError

USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""
RESTART_S = 60
"""Seconds between a failure and the next try, by systemd."""
SPREAD_S = 60
"""Seconds by which systemd's timer may be late, so that many machines do not start at once."""
MAX_CRON_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""

ON_ALL_NODES = "a folder that all nodes of the cluster share, as an absolute path (--shared-path FOLDER)"
ON_ALL_MACHINES = "a folder that all machines share, as an absolute path (--shared-path FOLDER)"


def manifest(spec: str, overrides: Sequence[str], options: Options, out: str | None, *, overwrite: bool = False) -> int:
    """Print or write the manifest; returns 0. UserError if the spec, an option or the place to write is unusable."""
    files = manifest_files(read_job(spec, overrides, options))
    if out is None:
        # One file as it is; several one after the other, each after a line with its name.
        headed = [f"# ==> {name} <==\n{text}" for name, text in files.items()]
        sys.stdout.write("\n".join(files.values() if len(files) == 1 else headed))
        return OK
    for name, text in files.items():
        _write(_target(out, name, files), text, overwrite=overwrite)
    return OK


def manifest_files(job: Job) -> dict[str, str]:
    """The manifest's files by name."""
    if job.options.kind == "systemd":
        return {f"{job.name}.service": service(job), f"{job.name}.timer": timer(job)}
    ending = {"slurm": "sh", "cron": "cron"}.get(job.options.kind, "yaml")
    return {f"{job.name}.{ending}": MAKERS[job.options.kind](job)}


def _target(out: str, name: str, files: Mapping[str, str]) -> Path:
    """The file to write: `out` itself, or a file in it if it is a folder or there are several files."""
    path = Path(out)
    if len(files) == 1 and not path.is_dir() and not out.endswith("/"):
        return path
    if path.exists() and not path.is_dir():
        raise UserError(f"{out!r} is a file; allowed: a folder, for the files {', '.join(files)}", field="--out")
    return path / name


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
    """A RayJob, RayCronJob or RayCluster."""
    facts, shapes, kind = _facts(job, IN_A_VOLUME), shapes_of(job), job.options.kind
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
    if kind == "raycronjob" and job.dated:
        facts["script"] = fill_template("raycronjob-run.sh.j2", command=RUN_COMMAND)
    return _fill(f"{kind}.yaml.j2", job, **facts)


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


# ---- one machine -----------------------------------------------------------------------------------------------------


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


def service(job: Job) -> str:
    """NAME.service for systemd: a run that never overlaps itself."""
    _check_places(job)
    options, secret = job.options, None
    if options.secret is not None:
        secret = systemd_path(check_folder(check_printable(options.secret, "--secret"), "--secret"), "--secret")
    # Starts are counted in less than the time between two of the timer's; None if that leaves no time to restart.
    interval_s = options.times.gap_s - SPREAD_S - RESTART_S
    return _fill(
        "service.j2",
        job,
        interval_s=interval_s if interval_s > RESTART_S and options.tries_again > 0 else None,
        user=options.user or _this_user(),
        directory=systemd_path(job.directory, "--directory"),
        secret=secret,
        command=systemd([*_run_words(job), "--quiet", "--grace-seconds", str(GRACE_S)]),
        restart_s=RESTART_S,
        kill_s=KILL_S,
        final=FINAL,
    )


def timer(job: Job) -> str:
    """NAME.timer for systemd."""
    return _fill("timer.j2", job, spread_s=SPREAD_S)


def _this_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


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


# ---- Ray's launcher --------------------------------------------------------------------------------------------------


def ray_up(job: Job) -> str:
    """A cluster file: machines of one's own that are reached by SSH, or machines on AWS."""
    shared = _shared_folders(job)
    refuse_unseen(job.spec, shared, allowed=ON_ALL_MACHINES)
    shape = one_shape(job)
    _check_machines(job.options)
    image = job.options.image or DEFAULT_IMAGE
    return _fill("ray-up.yaml.j2", job, shape=shape, shared=shared, image=image)


def _check_machines(options: Options) -> None:
    own = options.head_address is not None
    for field in ("region", "instance_type", "nodes", "max_nodes") if own else ("worker_address",):
        if getattr(options, field) not in (None, ()):
            why = "with --head-address the machines are given" if own else "the head's address is missing"
            raise UserError(
                f"{why}; allowed: --head-address and --worker-address for machines of your own, or --region, "
                "--instance-type, --nodes and --max-nodes for AWS",
                field=option_name(field),
            )
    for field, address in (
        ("--head-address", options.head_address),
        *(("--worker-address", address) for address in options.worker_address),
    ):
        if address is not None and not address.replace("-", "").replace(".", "").replace(":", "").isalnum():
            raise UserError(f"{address!r} is not allowed; allowed: the name or address of a machine", field=field)


MAKERS: Mapping[str, Callable[[Job], str]] = {
    "rayjob": with_cluster,
    "raycronjob": with_cluster,
    "raycluster": with_cluster,
    "cronjob": cronjob,
    "slurm": slurm,
    "cron": cron,
    "ray-up": ray_up,
}
"""The kinds of one file; systemd has two."""
