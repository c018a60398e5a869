"""Pods: the container of draftmill's image, its settings and secrets, and the files that it finds under /etc/draftmill.

The spec travels as an annotation of the pod, which Kubernetes shows to the container as a file. So a manifest is one object:
applied, changed and deleted as a whole.
"""

from __future__ import annotations

from typing import Any

from draftmill.jobs.manifests.commented import Path
from draftmill.jobs.manifests.job import GRACE_S, KILL_S, Job, spec_text
from draftmill.jobs.manifests.options import OWN_CLUSTER, option_name
from draftmill.jobs.manifests.visible import check_folder, on_s3, refuse_unseen
from draftmill.storage.errors import UserError

FOLDER = "/etc/draftmill"
SPEC = f"{FOLDER}/spec.yaml"
DEFAULT_IMAGE = "draftmill:0.1.0"
DEFAULT_SECRET = "draftmill-s3"

HOW = {
    "cronjob": "an absolute path in a folder that the cluster's pods all have (--shared-path FOLDER)",
    "else": "an absolute path in a volume that all pods mount (--volume CLAIM:FOLDER), or in the image (--shared-path FOLDER)",
}


def pod_annotations(job: Job, files: dict[str, str] | None = None) -> dict[str, str]:
    """The spec, and other files by name, as annotations of a pod."""
    return {"draftmill-spec.yaml": spec_text(job)} | {f"draftmill-{name}": text for name, text in (files or {}).items()}


def file_volume(names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The annotations of the pod as files in one volume."""
    return {
        "name": "draftmill",
        "downwardAPI": {
            "items": [
                {"path": name, "fieldRef": {"fieldPath": f"metadata.annotations['draftmill-{name}']"}}
                for name in ("spec.yaml", *names)
            ]
        },
    }


FILE_MOUNT = {"name": "draftmill", "mountPath": FOLDER, "readOnly": True}


def check_places(job: Job) -> None:
    """Refuse paths of this machine, which no pod has."""
    roots = [check_folder(path, "--shared-path") for path in job.options.shared_path]
    how = HOW.get(job.options.kind, HOW["else"])
    refuse_unseen(job.spec, [*roots, *(folder for _, folder in claims(job))], how=how)


def claims(job: Job) -> list[tuple[str, str]]:
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


def volumes(job: Job) -> list[dict[str, Any]]:
    """The claims as volumes."""
    return [
        {"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}}
        for index, (claim, _) in enumerate(claims(job))
    ]


def mounts(job: Job) -> list[dict[str, Any]]:
    """The claims as mounts."""
    return [{"name": f"claim-{index}", "mountPath": folder} for index, (_, folder) in enumerate(claims(job))]


def secret_name(job: Job) -> str | None:
    """The Secret with S3 credentials; none is needed where nothing is on S3, or a service account has the rights."""
    if job.options.secret is not None:
        return job.options.secret
    needs = on_s3(job.spec) and job.options.kind in OWN_CLUSTER and job.options.service_account is None
    return DEFAULT_SECRET if needs else None


def container(name: str, job: Job, resources: dict[str, str], *, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """A container of the image: what it may use is both its request and its limit."""
    made: dict[str, Any] = {"name": name, "image": job.options.image or DEFAULT_IMAGE}
    made |= {"env": environment(job)}
    if (secret := secret_name(job)) is not None:
        made["envFrom"] = [{"secretRef": {"name": secret}}]
    made["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    made["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return made | (more or {})


def environment(job: Job) -> list[dict[str, Any]]:
    """The variables of every container."""
    return [
        {"name": "RAY_AUTH_MODE", "value": job.options.auth_mode},
        {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(GRACE_S + 5)},
        {"name": "DRAFTMILL_GRACE_SECONDS", "value": str(GRACE_S)},
    ]


def pod(job: Job, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of a pod that does not run as root."""
    made: dict[str, Any] = {}
    if job.options.service_account is not None:
        made["serviceAccountName"] = job.options.service_account
    made["terminationGracePeriodSeconds"] = KILL_S
    made["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    made["containers"] = containers
    return made | ({"volumes": volumes} if volumes else {})


def metadata(job: Job) -> dict[str, Any]:
    """Name, namespace and label of the object."""
    made: dict[str, Any] = {"name": job.name}
    if job.options.namespace is not None:
        made["namespace"] = job.options.namespace
    return made | {"labels": {"app.kubernetes.io/name": "draftmill"}}


def pod_comments(job: Job, template: Path) -> dict[Path, str]:
    """What to know about a pod; `template` is the path of its template."""
    first = (*template, "spec", "containers", 0)
    return {
        (*template, "metadata", "annotations", "draftmill-spec.yaml"): f"The job. The container sees it as {SPEC}.",
        (*template, "spec", "terminationGracePeriodSeconds"): (
            f"SIGKILL comes {KILL_S} s after SIGTERM. Decoding stops before, and finished units stay."
        ),
        (*first, "env"): (
            "How Ray's processes authenticate each other, and the grace period: a driver ends "
            f"{GRACE_S} s after SIGTERM at the latest, and Ray waits a little longer before it kills it."
        ),
        (*first, "envFrom"): (
            "Credentials for S3 by reference, never in this file. Create the Secret once:\n"
            f"  kubectl create secret generic {secret_name(job)} --from-env-file=FILE\n"
            "FILE has lines AWS_ACCESS_KEY_ID=... and AWS_SECRET_ACCESS_KEY=... ."
        ),
        (*first, "securityContext"): "The image's user has the id 1000; nothing here needs root.",
    }
