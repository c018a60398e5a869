"""A cluster file for Ray's launcher, `ray up`: machines of one's own that are reached by SSH, or machines on AWS."""

from __future__ import annotations

from typing import Any

from draftmill.jobs.manifests.commented import Comments, documents
from draftmill.jobs.manifests.job import Job
from draftmill.jobs.manifests.pods import DEFAULT_IMAGE
from draftmill.jobs.manifests.quoting import shell
from draftmill.jobs.manifests.shape import Shape, one_shape
from draftmill.jobs.manifests.visible import check_folder, refuse_unseen
from draftmill.storage.errors import UserError

HOW = "a folder that all machines share, as an absolute path (--shared-path FOLDER)"
PORT = 6379
TOKEN = "~/.ray/auth_token"


def ray_up(job: Job) -> str:
    """The cluster file."""
    shared = [check_folder(path, "--shared-path") for path in job.options.shared_path]
    refuse_unseen(job.spec, shared, how=HOW)
    shape = one_shape(job)
    own = job.options.head_address is not None
    _check(job, own=own)
    data: dict[str, Any] = {"cluster_name": job.name}
    data |= _own_machines(job) if own else _aws(job, shape)
    data["auth"] = {"ssh_user": job.options.ssh_user or "ubuntu"}
    data["docker"] = _docker(job, shared, gpus=bool(shape.gpus))
    data["file_mounts"] = {TOKEN: TOKEN} if job.options.auth_mode == "token" else {}
    data["idle_timeout_minutes"] = 5
    data |= _commands(job)
    return documents(_head(job), [(data, _comments(job, shape))])


def _check(job: Job, *, own: bool) -> None:
    options = job.options
    refused = ("region", "instance_type", "nodes", "max_nodes") if own else ("worker_address",)
    for field in refused:
        if getattr(options, field) not in (None, ()):
            why = "with --head-address the machines are given" if own else "the head's address is missing"
            raise UserError(
                f"{why}; allowed: --head-address and --worker-address for machines of your own, or --region, "
                "--instance-type, --nodes and --max-nodes for AWS",
                field=f"--{field.replace('_', '-')}",
            )
    for field, address in (
        ("--head-address", options.head_address),
        *(("--worker-address", one) for one in options.worker_address),
    ):
        if address is not None and not address.replace("-", "").replace(".", "").replace(":", "").isalnum():
            raise UserError(f"{address!r} is not allowed; allowed: the name or address of a machine", field=field)


def _own_machines(job: Job) -> dict[str, Any]:
    workers = list(job.options.worker_address)
    return {
        "provider": {"type": "local", "head_ip": job.options.head_address, "worker_ips": workers},
        "min_workers": len(workers),
        "max_workers": len(workers),
    }


def _aws(job: Job, shape: Shape) -> dict[str, Any]:
    worker = job.options.instance_type or ("g5.xlarge" if shape.gpus else "m5.2xlarge")
    region = job.options.region or "us-west-2"
    return {
        "provider": {"type": "aws", "region": region, "cache_stopped_nodes": False},
        "max_workers": shape.most_nodes,
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m5.large"}},
            "decode": {
                "min_workers": shape.nodes,
                "max_workers": shape.most_nodes,
                "resources": {},
                "node_config": {"InstanceType": worker, "InstanceMarketOptions": {"MarketType": "spot"}},
            },
        },
        "head_node_type": "head",
    }


def _docker(job: Job, shared: list[str], *, gpus: bool) -> dict[str, Any]:
    options = ["--entrypoint=''", "--ulimit=nofile=65536:65536", f"--env=RAY_AUTH_MODE={job.options.auth_mode}"]
    if job.options.secret is not None:
        options.append(shell([f"--env-file={job.options.secret}"]))
    options += [shell([f"--volume={folder}:{folder}"]) for folder in shared]
    made: dict[str, Any] = {"image": job.options.image or DEFAULT_IMAGE, "container_name": "draftmill"}
    made |= {"pull_before_run": True, "run_options": options}
    return made | {"worker_run_options": ["--gpus=all"]} if gpus else made


def _commands(job: Job) -> dict[str, Any]:
    setting = f"export RAY_AUTH_MODE={job.options.auth_mode} RAY_USAGE_STATS_ENABLED=0"
    head = f"ray start --head --port={PORT} --autoscaling-config=~/ray_bootstrap_config.yaml --dashboard-host=127.0.0.1"
    head += " --num-cpus=0" if job.options.head_address is None else ""
    return {
        "head_start_ray_commands": ["ray stop", f"{setting}; {head}"],
        "worker_start_ray_commands": ["ray stop", f"{setting}; ray start --address=$RAY_HEAD_IP:{PORT}"],
    }


def _comments(job: Job, shape: Shape) -> Comments:
    return {
        ("provider",): "The machines." if job.options.head_address else "Where the machines are rented.",
        ("available_node_types", "head"): "The head runs the driver; no worker is placed on it.",
        ("available_node_types", "decode", "min_workers"): f"Nodes. {shape.why}",
        ("available_node_types", "decode", "node_config"): (
            "Spot machines: one that is taken away costs the work on its units, which other nodes repeat. "
            "For S3 without keys, add IamInstanceProfile: {Arn: ...} here and to the head."
        ),
        ("docker",): (
            "The image of driver and workers. Its entry point is draftmill, and `ray up` needs a shell. Credentials "
            "come from the machines' role, or from a file of KEY=VALUE lines on each machine (--secret FILE)."
        ),
        ("file_mounts",): (
            "The token by which Ray's processes authenticate each other; `ray get-auth-token --generate` makes it."
            if job.options.auth_mode == "token"
            else "Without authentication, anybody who reaches the cluster's ports can run code in it."
        ),
        ("idle_timeout_minutes",): "Machines without work for this long are given back.",
        ("head_start_ray_commands",): (
            "`ray stop` ends every Ray of the container. A head that is lost ends the driver: submit again, and the job goes on."
        ),
    }


def _head(job: Job) -> str:
    mode = job.options.auth_mode
    token = "  ray get-auth-token --generate\n" if mode == "token" else ""
    return f"""\
A cluster for Ray's launcher, with room for the job. It needs Docker and SSH on the machines.
  export RAY_AUTH_MODE={mode}
{token}  ray up --yes FILE
  ray dashboard FILE &      # the cluster's job server at http://127.0.0.1:8265
  draftmill submit SPEC --address http://127.0.0.1:8265
  ray down --yes FILE
A job that was interrupted goes on with the same `draftmill submit`; what was committed stays committed."""
