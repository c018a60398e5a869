"""Kubernetes manifests with a Ray cluster: RayJob, RayCronJob and RayCluster of the KubeRay operator."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from draftmill.jobs.manifests.commented import Path, documents
from draftmill.jobs.manifests.job import Job
from draftmill.jobs.manifests.pods import (
    FILE_MOUNT,
    FOLDER,
    SPEC,
    check_places,
    container,
    file_volume,
    metadata,
    mounts,
    pod,
    pod_annotations,
    pod_comments,
    volumes,
)
from draftmill.jobs.manifests.quoting import shell
from draftmill.jobs.manifests.shape import Shape, shapes_of

RUN = ["draftmill", "run", SPEC, "--ray-address", "auto", "--if-running", "skip"]
"""The driver's command. Its words need no quotes: KubeRay and Ray each pass it through a shell."""

DAY_S = 86400
HEAD = {"cpu": "2", "memory": "4Gi"}

LOGICAL_DATE = """\
#!/bin/bash
# KubeRay names the cluster of a scheduled run NAME-MINUTES-SUFFIX, with the minutes from 1970 to the time of the schedule.
# A run that starts late, or again, has the date for which it was scheduled.
set -euo pipefail
name=${RAY_CLUSTER_NAME:-}
minutes=${name%-*}
minutes=${minutes##*-}
date=()
if [[ $minutes =~ ^[1-9][0-9]{7}$ ]]; then
  date=(--logical-date "$(date --utc --date="@$((minutes * 60))" +%Y-%m-%dT%H:%M:%SZ)")
fi
exec COMMAND "${date[@]}"
"""


def rayjob(job: Job) -> str:
    """One run: a cluster comes up, the job runs, the cluster goes."""
    check_places(job)
    date = ["--logical-date", job.options.date] if job.dated else []
    spec = {"entrypoint": shell([*RUN, *date])} | _limits(job)
    spec |= {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 300}
    spec |= {"rayClusterSpec": cluster(job)}
    data = _object("RayJob", job, spec)
    comments = _job_comments(("spec",)) | cluster_comments(job, ("spec", "rayClusterSpec"))
    comments |= {
        ("spec", "ttlSecondsAfterFinished"): "Seconds after the end of the job at which the cluster is deleted."
    }
    if job.dated:
        comments["spec", "entrypoint"] += " The date is fixed, so that a try after midnight goes on with the same run."
    head = f"""\
A RayJob: one run of a job on a Ray cluster of its own. It needs a Kubernetes cluster with the KubeRay operator, 1.5.1 or newer.
  kubectl apply -f FILE
  kubectl get rayjob {job.name}
  kubectl delete -f FILE
Deleted and applied again, it goes on where it stopped: finished units stay, and are not decoded again."""
    return documents(head, [(data, comments)])


def raycronjob(job: Job) -> str:
    """A schedule: each time a RayJob with a cluster of its own."""
    check_places(job)
    times = job.options.times
    script = {"run.sh": LOGICAL_DATE.replace("COMMAND", shell(RUN))} if job.dated else {}
    template = {"entrypoint": f"bash {FOLDER}/run.sh" if job.dated else shell(RUN)} | _limits(job)
    template |= {"deletionStrategy": {"deletionRules": _deletion_rules()}}
    template |= {"rayClusterSpec": cluster(job, script)}
    spec: dict[str, Any] = {"schedule": times.text, "timeZone": job.options.time_zone or "Etc/UTC"}
    data = _object("RayCronJob", job, spec | {"suspend": False, "jobTemplate": template})
    at = ("spec", "jobTemplate")
    comments = _job_comments(at) | cluster_comments(job, (*at, "rayClusterSpec")) | {
        ("spec", "schedule"): "Minute, hour, day of month, month, day of week, in this time zone.",
        ("spec", "suspend"): "true stops the schedule; runs that have started go on.",
        (*at, "deletionStrategy"): (
            "RayCronJob has no limits on its history: these rules delete the clusters first, and the RayJobs later. "
            "A RayJob that is deleted takes nothing with it: results are in output.path."
        ),
        (*at, "rayClusterSpec", "headGroupSpec", "template", "metadata", "annotations", "draftmill-run.sh"): (
            "The command, with the date for which the run was scheduled."
        ),
    }  # fmt: skip
    head = f"""\
A RayCronJob: a job on a schedule, each time on a Ray cluster of its own. It needs the KubeRay operator, 1.6.0 or newer, with the
feature gate RayCronJob, which is off by default. With Helm:
  featureGates: [{{name: RayCronJob, enabled: true}}]
Without the gate use a CronJob (draftmill manifest --for cronjob).
  kubectl apply -f FILE
  kubectl get rayjob --selector ray.io/cronjob-name={job.name}
RayCronJob starts each run on time, also while another one works, and after an outage one run for each time that was missed.
--if-running skip makes this safe: a run that meets another one of this job ends at once, with exit code 0."""
    return documents(head, [(data, comments)])


def raycluster(job: Job) -> str:
    """A standing cluster, to which jobs are submitted."""
    check_places(job)
    spec = cluster(job, spec_file=False)
    head = f"""\
A RayCluster: a standing Ray cluster with room for the job, which other programs submit jobs to, such as
`draftmill submit` and the CronJob of `draftmill manifest --for cronjob --ray-cluster {job.name}`.
It needs a Kubernetes cluster with the KubeRay operator, 1.5.1 or newer. It stays until it is deleted:
  kubectl apply -f FILE
  kubectl delete -f FILE"""
    return documents(head, [(_object("RayCluster", job, spec), cluster_comments(job, ("spec",)))])


def _object(kind: str, job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata(job), "spec": spec}


def _limits(job: Job) -> dict[str, Any]:
    return {
        "submissionMode": "K8sJobMode",
        "backoffLimit": job.options.tries_again,
        "activeDeadlineSeconds": job.options.limit_s,
    }


def _deletion_rules() -> list[dict[str, Any]]:
    succeeded = {"jobStatus": "SUCCEEDED"}
    failed = {"jobDeploymentStatus": "Failed"}
    return [
        {"policy": "DeleteCluster", "condition": succeeded | {"ttlSeconds": 300}},
        {"policy": "DeleteSelf", "condition": succeeded | {"ttlSeconds": DAY_S}},
        {"policy": "DeleteCluster", "condition": failed | {"ttlSeconds": 3600}},
        {"policy": "DeleteSelf", "condition": failed | {"ttlSeconds": 7 * DAY_S}},
    ]


def _job_comments(at: Path) -> dict[Path, str]:
    return {
        (*at, "entrypoint"): (
            "The driver; it runs in the head's pod. A run that meets another one of the same job ends at once, with exit code 0."
        ),
        (*at, "backoffLimit"): (
            "How often a driver that failed is started again, each time on a new cluster. It resumes: what was committed stays "
            "committed. KubeRay does so after any failure, also where another try can't help (a spec that can't be used)."
        ),
        (
            *at,
            "activeDeadlineSeconds",
        ): "Seconds after which the job is stopped, tries included. Apply it again to go on.",
    }


def cluster(job: Job, files: dict[str, str] | None = None, *, spec_file: bool = True) -> dict[str, Any]:
    """The spec of a Ray cluster: a head for the driver, and a group of workers for each shape of the spec."""
    shapes = shapes_of(job)
    grows = any(shape.most_nodes > shape.nodes for shape in shapes)
    made: dict[str, Any] = {"rayVersion": version("ray"), "authOptions": {"mode": job.options.auth_mode}}
    if grows:
        made["enableInTreeAutoscaling"] = True
        made["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 120}
    made["headGroupSpec"] = _head(job, files or {}, spec_file=spec_file)
    made["workerGroupSpecs"] = [
        _group(job, shape, "decode" if len(shapes) == 1 else f"decode-{index}") for index, shape in enumerate(shapes)
    ]
    return made


def _head(job: Job, files: dict[str, str], *, spec_file: bool) -> dict[str, Any]:
    mounted = [*([FILE_MOUNT] if spec_file else []), *mounts(job)]
    main = container("ray-head", job, HEAD, more={"volumeMounts": mounted} if mounted else None)
    attached = [*([file_volume(tuple(files))] if spec_file else []), *volumes(job)]
    template: dict[str, Any] = {"metadata": {"annotations": pod_annotations(job, files)}} if spec_file else {}
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": template | {"spec": pod(job, [main], attached)},
    }


def _group(job: Job, shape: Shape, name: str) -> dict[str, Any]:
    resources = {"cpu": str(shape.cpus), "memory": shape.memory}
    if shape.gpus:
        resources["nvidia.com/gpu"] = str(shape.gpus)
    mounted = mounts(job)
    main = container("ray-worker", job, resources, more={"volumeMounts": mounted} if mounted else None)
    return {
        "groupName": name,
        "replicas": shape.nodes,
        "minReplicas": shape.nodes,
        "maxReplicas": shape.most_nodes,
        "rayStartParams": {},
        "template": {"spec": pod(job, [main], volumes(job))},
    }


def cluster_comments(job: Job, at: Path) -> dict[Path, str]:
    """What to know about the cluster; `at` is the path of its spec."""
    found: dict[Path, str] = {
        (*at, "rayVersion"): "The Ray in the image; driver, head and workers must have the same.",
        (*at, "authOptions"): (
            "KubeRay makes a token for the cluster, keeps it in a Secret and gives it to every pod: nobody else's jobs get in."
            if job.options.auth_mode == "token"
            else "Anybody who reaches the cluster's ports can run code in it."
        ),
        (*at, "autoscalerOptions"): "Nodes come when work waits for them, and go after two minutes without any.",
        (*at, "headGroupSpec", "rayStartParams"): "The head runs the driver; no worker is placed on it.",
    }
    found |= pod_comments(job, (*at, "headGroupSpec", "template"))
    for index, shape in enumerate(shapes_of(job)):
        group = (*at, "workerGroupSpecs", index)
        found[*group, "replicas"] = f"Nodes. {shape.why}"
        found[*group, "template", "spec", "containers", 0, "resources"] = (
            "A node's CPUs, memory and GPUs; requests and limits are equal, so that a node is never overbooked."
        )
    return found
