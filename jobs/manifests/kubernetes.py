"""What the Kubernetes manifests are filled with: KubeRay's RayJob, RayCronJob and RayCluster, and Kubernetes' own CronJob."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from draftmill.jobs.exit_codes import FINAL
from draftmill.jobs.manifests.job import GRACE_S, KILL_S, Job, spec_text
from draftmill.jobs.manifests.options import OWN_CLUSTER, option_name
from draftmill.jobs.manifests.shape import Shape, shapes_of
from draftmill.jobs.manifests.templates import fill_template
from draftmill.jobs.manifests.visible import check_folder, on_s3, refuse_unseen
from draftmill.storage.errors import UserError

FOLDER = "/etc/draftmill"
SPEC = f"{FOLDER}/spec.yaml"
DEFAULT_IMAGE = "draftmill:0.1.0"
DEFAULT_SECRET = "draftmill-s3"
DEFAULT_CLUSTER = "draftmill"

RUN = ["draftmill", "run", SPEC, "--ray-address", "auto", "--if-running", "skip"]
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
    date = ["--logical-date", job.options.date] if job.dated and kind == "rayjob" else []
    facts |= {
        "ray_version": version("ray"),
        "head_resources": {"cpu": "2", "memory": "4Gi"},
        "groups": groups,
        "grows": any(shape.most_nodes > shape.nodes for shape in shapes),
        "command": [*RUN, *date],
    }
    if kind == "raycronjob" and job.dated:
        facts["script"] = fill_template("raycronjob-run.sh.j2", command=RUN)
    return fill_template(f"{kind}.yaml.j2", **facts)


def cronjob(job: Job) -> str:
    """A CronJob, which submits to a cluster that is there."""
    facts = _facts(job, IN_A_CLUSTER)
    cluster = job.options.ray_cluster or DEFAULT_CLUSTER
    address = _address(job, cluster)
    command = ["draftmill", "submit", SPEC, "--address", address, "--code", "installed"]
    command += [word for folder in job.options.shared_path for word in ("--shared", folder)]
    command += ["--grace-seconds", str(GRACE_S), "--if-running", "skip"]
    if job.dated:
        facts["script"] = fill_template("cronjob-run.sh.j2", command=command)
        command = ["bash", f"{FOLDER}/run.sh"]
    resources = {"cpu": "500m", "memory": "1Gi"}
    return fill_template(
        "cronjob.yaml.j2", **facts, ray_cluster=cluster, address=address, command=command, resources=resources
    )


def _facts(job: Job, how: str) -> dict[str, Any]:
    """What all of them name; UserError for a path of this machine, which no pod has."""
    roots, claims = [check_folder(path, "--shared-path") for path in job.options.shared_path], _claims(job)
    refuse_unseen(job.spec, [*roots, *(folder for _, folder in claims)], how=how)
    return {
        "name": job.name,
        "options": job.options,
        "dated": job.dated,
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
    """The persistent volume claims and where they are mounted."""
    found = []
    for given in job.options.volume:
        claim, colon, folder = given.partition(":")
        if not colon or not claim.replace("-", "").replace(".", "").isalnum() or claim != claim.lower():
            raise UserError(
                f"{given!r} is not allowed; allowed: CLAIM:FOLDER, like results:/data", field=option_name("volume")
            )
        found.append((claim, check_folder(folder, option_name("volume"))))
    return found


def _secret(job: Job) -> str | None:
    """The Secret with S3 credentials; none is needed where nothing is on S3, or a service account has the rights."""
    if job.options.secret is not None:
        return job.options.secret
    needs = on_s3(job.spec) and job.options.kind in OWN_CLUSTER and job.options.service_account is None
    return DEFAULT_SECRET if needs else None


def _resources(shape: Shape) -> dict[str, str]:
    found = {"cpu": str(shape.cpus), "memory": shape.memory}
    return found | {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else found


def _address(job: Job, cluster: str) -> str:
    if job.options.head_address is None:
        return f"http://{cluster}-head-svc:8265"
    if job.options.ray_cluster is not None:
        raise UserError(
            "--ray-cluster gives the address, too; allowed: only one of the two options", field="--head-address"
        )
    address = job.options.head_address
    return address if "://" in address else f"http://{address}"
