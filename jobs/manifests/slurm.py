"""A batch script for Slurm: Ray over the nodes of the job, the driver on the first of them, and a requeue where it helps."""

from __future__ import annotations

import math
import os

from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.manifests.commented import comment
from draftmill.jobs.manifests.job import GRACE_S, Job
from draftmill.jobs.manifests.options import size_bytes
from draftmill.jobs.manifests.quoting import shell
from draftmill.jobs.manifests.shape import Shape, one_shape
from draftmill.jobs.manifests.visible import check_folder, local_places, refuse_node_local

USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""


def slurm(job: Job) -> str:
    """The script."""
    shape = one_shape(job)
    if shape.nodes > 1:
        shared = [check_folder(path, "--shared-path") for path in job.options.shared_path]
        places = [("SPEC.yaml", job.path), ("--directory", job.directory), ("--program", job.program)]
        refuse_node_local([*places, *local_places(job.spec)], job.directory, shared)
    return "\n".join(["#!/bin/bash", _head(job, shape), _directives(job, shape), _body(job)])


def _head(job: Job, shape: Shape) -> str:
    times = (
        f"\nOn a schedule, by scrontab (`scrontab -e`) or by cron on a machine that can submit:\n  {job.options.times.text} "
        "sbatch /path/to/this/file"
        if job.options.schedule is not None
        else ""
    )
    date = "\nFor another date:\n  sbatch --export=ALL,DRAFTMILL_LOGICAL_DATE=2026-11-21 FILE" if job.dated else ""
    return comment(
        f"""\
A batch script for Slurm: it starts Ray on the nodes of the job and runs a draftmill job on them.
  sbatch FILE
  squeue --name={job.name}
  scancel --name={job.name}
Submitted again after an interruption, it goes on where it stopped: finished units stay, and are not decoded again.
Paths are those of this machine: the spec, the program, local models, inputs and results must be on a file system that all nodes
share, or on S3.{times}{date}

{shape.why}"""
    ).rstrip("\n")


def _directives(job: Job, shape: Shape) -> str:
    options = job.options
    lines = [
        ("", f"--job-name={job.name}"),
        ("", f"--nodes={shape.nodes}"),
        ("", "--ntasks-per-node=1"),
        ("", f"--cpus-per-task={shape.cpus}"),
        *([("", f"--gpus-per-node={shape.gpus}")] if shape.gpus else []),
        ("", f"--mem={math.ceil(size_bytes(shape.memory) / 2**20)}M"),
        *([("", f"--account={options.account}")] if options.account else []),
        *([("", f"--partition={options.partition}")] if options.partition else []),
        ("A run is stopped after this time, and requeued.", f"--time={_time(options.limit_s)}"),
        (f"{USR1_S} s before that, the script is told.", f"--signal=B:USR1@{USR1_S}"),
        ("Slurm starts the job again if a node fails or another job takes its nodes.", "--requeue"),
        ("One log for all starts of a job.", "--open-mode=append"),
        ("", "--output=%x-%j.log"),
        ("A second job of this name and user waits for the first.", "--dependency=singleton"),
    ]
    return "".join(f"{f'# {said}{chr(10)}' if said else ''}#SBATCH {directive}\n" for said, directive in lines)


def _time(seconds: int) -> str:
    """Slurm's form: days-hours:minutes:seconds."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _body(job: Job) -> str:
    parts = ["set -euo pipefail", f"cd {shell([job.directory])}"]
    parts.append(f"export PATH={shell([os.path.dirname(job.program)])}:$PATH")
    if job.options.secret is not None:
        parts.append("# Credentials by reference: KEY=VALUE lines in a file of mode 600.")
        parts.append(f"set -a\n# shellcheck source=/dev/null\n. {shell([job.options.secret])}\nset +a")
    parts.append(_auth(job))
    parts += [DATE] if job.dated else []
    parts += [RAY, _driver(job)]
    end = END + (END_OF_DATE if job.dated else "") + LAST
    over = " | ".join(map(str, (OK, *FINAL)))
    return "\n".join([*parts, end.replace("RETRIES", str(job.options.tries_again)).replace("OVER", over)])


def _auth(job: Job) -> str:
    if job.options.auth_mode == "disabled":
        return "# Anybody who reaches the ports of these nodes can run code in this job.\nexport RAY_AUTH_MODE=disabled"
    return AUTH


def _driver(job: Job) -> str:
    words = [job.program, "run", job.path, *job.sets(), "--if-running", "skip", "--grace-seconds", str(GRACE_S)]
    return DRIVER.replace("COMMAND", shell(words) + (' --logical-date "$(cat "$stamp")"' if job.dated else ""))


AUTH = """\
# Each start has a token of its own; srun hands it to the other nodes. Other users of the nodes can't run code in this job.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_TOKEN"""

DATE = """
# The date of the first start: a job that is requeued goes on with the same run, also after midnight.
stamp=.draftmill-$SLURM_JOB_ID.date
[ -s "$stamp" ] || echo "${DRAFTMILL_LOGICAL_DATE:-$(date --utc +%Y-%m-%dT%H:%M:%SZ)}" > "$stamp"
"""

RAY = """
export RAY_USAGE_STATS_ENABLED=0
# Since Slurm 22.05 srun takes the CPUs of a task from here, not from --cpus-per-task.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
driver=
stop=no       # a signal came
again=no      # the job is to be requeued
tell() { stop=yes; if [ -n "$driver" ]; then kill -TERM "$driver" 2>/dev/null || true; fi; }
trap 'again=yes; tell' USR1     # the time limit is near
trap 'tell' TERM INT            # cancelled, preempted or requeued: Slurm knows what comes next

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The address by which the other nodes reach this one. Set DRAFTMILL_HEAD_IP if the first one is not it.
ip=${DRAFTMILL_HEAD_IP:-$(hostname --all-ip-addresses | awk '{print $1}')}
port=$((20000 + SLURM_JOB_ID % 10000))
temp=/tmp/ray-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# start NODE OPTION...: Ray on one node, with what Slurm gave to the job there.
start() {
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" ray start "${@:2}" --num-cpus="$SLURM_CPUS_PER_TASK" \\
    --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --min-worker-port=0 --max-worker-port=0 --block &
}
start "${nodes[0]}" --head --node-ip-address="$ip" --port="$port" --ray-client-server-port="$((port - 10000))" \\
  --include-dashboard=false --temp-dir="$temp"
for _ in $(seq 120); do
  if [ "$stop" = yes ] || (exec 3<>"/dev/tcp/$ip/$port") 2>/dev/null; then break; fi
  sleep 1
done
for node in "${nodes[@]:1}"; do
  start "$node" --address="$ip:$port"
done

# A job that asks for more than has joined is refused, so wait for all nodes; after 5 minutes go on with those that are there.
nodes_are_up() {
  python3 - "$ip:$port" "${#nodes[@]}" <<'PYTHON'
import logging, sys, time
import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
end = time.monotonic() + 300
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]) and time.monotonic() < end:
    time.sleep(1)
PYTHON
}"""

DRIVER = """
code=1
if [ "$stop" = no ] && nodes_are_up; then
  COMMAND --ray-address "$ip:$port" &
  driver=$!
  if [ "$stop" = yes ]; then tell; fi
  # A signal ends `wait`, not the driver.
  while :; do
    code=0
    wait "$driver" || code=$?
    kill -0 "$driver" 2>/dev/null || break
  done
fi"""

END = """
# 0: finished. 2: the spec or the input can't be used. 3: too many samples failed. Another try would end alike.
# 1 and others: something unexpected, such as a lost head node. 4: interrupted. Both resume, unless somebody stopped the job.
case $code in
  OVER) again=no ;;
  *) if [ "$stop" = no ]; then again=yes; fi ;;
esac
if [ "$again" = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt RETRIES ]; then
  echo "draftmill ended with exit code $code; requeued, restart $((${SLURM_RESTART_COUNT:-0} + 1)) of RETRIES"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$code"
fi
"""

END_OF_DATE = """\
rm -f "$stamp"
"""

LAST = """\
exit "$code"
"""
