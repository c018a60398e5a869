"""Kubernetes' own CronJob: a pod on a schedule that submits the job to a standing Ray cluster and waits for its end."""

from __future__ import annotations

from typing import Any

from draftmill.jobs.exit_codes import FINAL
from draftmill.jobs.manifests.commented import Comments, documents
from draftmill.jobs.manifests.job import GRACE_S, Job
from draftmill.jobs.manifests.pods import (
    FILE_MOUNT,
    FOLDER,
    SPEC,
    check_places,
    container,
    file_volume,
    metadata,
    pod,
    pod_annotations,
    pod_comments,
)
from draftmill.jobs.manifests.quoting import shell
from draftmill.storage.errors import UserError

DEFAULT_CLUSTER = "draftmill"
RESOURCES = {"cpu": "500m", "memory": "1Gi"}

SCRIPT = """\
#!/bin/bash
# Kubernetes names the Job of a scheduled run NAME-MINUTES, with the minutes from 1970 to the time of the schedule.
# A run that starts late, or again, has the date for which it was scheduled.
set -euo pipefail
minutes=${JOB_NAME##*-}
date=()
if [[ $minutes =~ ^[1-9][0-9]{7}$ ]]; then
  date=(--logical-date "$(date --utc --date="@$((minutes * 60))" +%Y-%m-%dT%H:%M:%SZ)")
fi
exec COMMAND "${date[@]}"
"""


def cronjob(job: Job) -> str:
    """The manifest."""
    check_places(job)
    script = {"run.sh": SCRIPT.replace("COMMAND", shell(_command(job)))} if job.dated else {}
    template = {
        "metadata": {"annotations": pod_annotations(job, script)},
        "spec": pod(job, [_container(job)], [file_volume(tuple(script))]) | {"restartPolicy": "Never"},
    }
    work: dict[str, Any] = {
        "backoffLimit": job.options.tries_again,
        "activeDeadlineSeconds": job.options.limit_s,
        "ttlSecondsAfterFinished": 7 * 86400,
        "podFailurePolicy": _failure_policy(),
        "template": template,
    }
    spec = {
        "schedule": job.options.times.text,
        "timeZone": job.options.time_zone or "Etc/UTC",
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 3600,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        "suspend": False,
        "jobTemplate": {"spec": work},
    }
    data = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata(job), "spec": spec}
    return documents(_head(job), [(data, _comments(job))])


def _command(job: Job) -> list[str]:
    command = ["draftmill", "submit", SPEC, "--address", _address(job), "--code", "installed"]
    command += [word for folder in job.options.shared_path for word in ("--shared", folder)]
    return [*command, "--grace-seconds", str(GRACE_S), "--if-running", "skip"]


def _address(job: Job) -> str:
    if job.options.head_address is None:
        return f"http://{_cluster(job)}-head-svc:8265"
    if job.options.ray_cluster is not None:
        raise UserError(
            "--ray-cluster gives the address, too; allowed: only one of the two options", field="--head-address"
        )
    address = job.options.head_address
    return address if "://" in address else f"http://{address}"


def _cluster(job: Job) -> str:
    return job.options.ray_cluster or DEFAULT_CLUSTER


def _container(job: Job) -> dict[str, Any]:
    made = container("submit", job, RESOURCES)
    made["command"] = ["bash", f"{FOLDER}/run.sh"] if job.dated else _command(job)
    if job.dated:
        label = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-name']"}}
        made["env"].append({"name": "JOB_NAME", "valueFrom": label})
    if job.options.auth_mode == "token":
        token = {"secretKeyRef": {"name": _cluster(job), "key": "auth_token"}}
        made["env"].append({"name": "RAY_AUTH_TOKEN", "valueFrom": token})
    return made | {"volumeMounts": [FILE_MOUNT]}


def _failure_policy() -> dict[str, Any]:
    hopeless = {"containerName": "submit", "operator": "In", "values": list(FINAL)}
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": hopeless},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }


def _comments(job: Job) -> Comments:
    work = ("spec", "jobTemplate", "spec")
    first = (*work, "template", "spec", "containers", 0)
    return pod_comments(job, (*work, "template")) | {
        ("spec", "schedule"): "Minute, hour, day of month, month, day of week, in this time zone.",
        ("spec", "concurrencyPolicy"): (
            "No second run while one works. The job's own lease holds also against runs that something else starts: "
            "--if-running skip ends such a run at once, with exit code 0."
        ),
        ("spec", "startingDeadlineSeconds"): "A run that could not start for an hour after its time is left out.",
        ("spec", "successfulJobsHistoryLimit"): "How many finished Jobs are kept for their logs.",
        ("spec", "suspend"): "true stops the schedule; runs that have started go on.",
        (*work, "backoffLimit"): "How often a run that failed is started again. It resumes: what was committed stays.",
        (*work, "activeDeadlineSeconds"): "Seconds after which a run is stopped, tries included. The next one goes on.",
        (
            *work,
            "ttlSecondsAfterFinished",
        ): "Seconds after its end at which a Job is deleted, also one outside the limits above.",
        (*work, "podFailurePolicy"): (
            "Exit codes 2 (the spec or the input can't be used) and 3 (too many samples failed) are not tried again; a pod that "
            "its node had to give up is, without counting."
        ),
        (*first, "env"): (
            "How the job authenticates to Ray: the token that KubeRay keeps in a Secret with the name of the cluster."
            if job.options.auth_mode == "token"
            else "Anybody who reaches the cluster's ports can run code in it."
        ),
        (*work, "template", "metadata", "annotations", "draftmill-run.sh"): (
            "The command, with the date for which the run was scheduled."
        ),
    }


def _head(job: Job) -> str:
    return f"""\
A CronJob: on a schedule, a pod submits the job to a Ray cluster that is there, follows its log and ends with its exit code.
It needs no feature gate, and a standing Ray cluster at {_address(job)}
(`draftmill manifest SPEC --for raycluster --name {_cluster(job)}` makes one for the KubeRay operator).
  kubectl apply -f FILE
  kubectl create job --from=cronjob/{job.name} {job.name}-now
  kubectl get jobs
  kubectl delete -f FILE"""
