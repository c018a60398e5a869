"""`draftmill submit` runs a spec on a cluster through Ray's job API, follows it, and returns the driver's own exit code.

The same command again follows the job while it runs; when it has ended, it starts the next one, which resumes the run.
`draftmill stop` ends such a job, or the driver of this machine that works on a run directory; both can be resumed.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from draftmill.jobs.config.paths import FoundPlace, absolute, is_inside, places_of
from draftmill.jobs.config.spec import JobSpec, at_date, load_spec, with_logical_date
from draftmill.jobs.config.yaml_file import read_mapping
from draftmill.jobs.drive.driver import interruptible
from draftmill.jobs.drive.leases import TTL_S
from draftmill.jobs.drive.log import print_result
from draftmill.jobs.exit_codes import INTERRUPTED, OK, SEVEREST, UNEXPECTED
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.remote import cluster
from draftmill.jobs.remote.cluster import FIELD, RayJobs
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.lease import holder, pid_here
from draftmill.storage.secrets import is_secret_variable
from draftmill.storage.stores.store import Place, Store, is_local, open_store
from draftmill.version import ROOT, __version__

_log = logging.getLogger(__name__)

POLL_S = 1.0
READ_PER_S = 200_000
"""Most characters of log that are read per second on average: a long log is read less often."""

SILENT_S = 60.0
"""Seconds without any answer of the cluster after which it counts as lost: as long as a driver waits for a lost head."""

READY_S = 60.0
"""How long a cluster that has just started may take until it accepts jobs."""

SHIPPED = ("working_dir", "py_modules", "excludes")
"""Keys of a runtime environment that name folders of this machine: no part of a job's settings."""


def submit(spec: JobSpec, address: str | None, options: SubmitOptions, *, wait: bool = True) -> int:
    """Submit a spec and follow it, or follow the job that runs for the same run directory; returns the exit code.

    `address` None: that of RAY_API_SERVER_ADDRESS. Without `wait`, prints the job's name and returns 0 once the cluster has it.
    UserError if the spec can't run there.
    """
    address = address or os.environ.get(cluster.ADDRESS_VARIABLE)
    if not address:
        raise UserError(f"missing; allowed: http://HOST:8265, or set {cluster.ADDRESS_VARIABLE}", field=FIELD)
    if logical_date := at_date(spec, datetime.now(UTC)).output.logical_date:
        spec = with_logical_date(spec, logical_date)  # the driver does not read the clock again
    request, client = request_of(spec, options), RayJobs(address)
    name = start(client, spec, request)
    if not wait:
        print_result(name)
        return OK
    return follow(client, name)


def start(client: RayJobs, spec: JobSpec, request: SubmitRequest) -> str:
    """The name of the job that runs for the spec's run directory: one that is there already, or a new one."""
    run = absolute(at_date(spec, datetime.now(UTC)).output.path.rstrip("/"))
    stem = cluster.stem_of(spec.name, run, spec.s3.endpoint)
    settings = {key: value for key, value in request.environment.items() if key not in SHIPPED}
    asked = digest([request.entrypoint, str(settings)])[:12]
    until_s = time.monotonic() + READY_S
    # By the hash of the run directory: a job may have been renamed.
    pattern = re.compile(rf"draftmill-(?:[a-z0-9-]+-)?{stem.rpartition('-')[2]}-(\d+)")
    while True:
        matches = [(pattern.fullmatch(job.submission_id or ""), job) for job in client.jobs()]
        known = {int(match[1]): job for match, job in matches if match}
        running = [number for number, job in known.items() if not cluster.is_over(job)]
        if running:
            job = known[max(running)]
            other = (job.metadata or {}).get(cluster.SPEC) != asked
            changed = "; it was submitted with other settings, which stay in force until it has ended" if other else ""
            _log.info(f"{job.submission_id} runs already for this run directory{changed}")
            return str(job.submission_id)
        name = f"{stem}-{max(known, default=0) + 1}"
        try:
            metadata = {cluster.RUN: run, cluster.SPEC: asked, "draftmill": __version__}
            client.submit(name, request.entrypoint, request.environment, metadata)
            _log.info(f"submitted {name} to {client.url} (Ray {client.ray_version})")
            return name
        except cluster.JobExists:
            continue  # another submission of the same run was faster
        except cluster.NotReady:
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)


def follow(client: RayJobs, name: str) -> int:
    """Print the job's log until it has ended; returns its exit code. An interrupt ends the following, not the job."""
    try:
        with interruptible():
            code, message = end_of(print_log(client, name))
    except KeyboardInterrupt:
        _log.info(
            f"not following any more; {name} continues. Follow it again: the same command. "
            f"Stop it: draftmill stop {name} --address {client.url}"
        )
        return INTERRUPTED
    except cluster.Unreachable as error:
        raise cluster.Unreachable(
            f"{error}; what became of {name} is unknown: submit it again to follow or resume it"
        ) from None
    if message:
        _log.info(message)
    return code


def print_log(client: RayJobs, name: str) -> Any:
    """Print each text of a job's log once, although each request brings the whole log; returns the job when it is over.

    cluster.Unreachable if the cluster is silent for SILENT_S.
    """
    printed, read_at_s, heard_s = 0, 0.0, time.monotonic()
    while True:
        now_s = time.monotonic()
        try:
            job = client.info(name)
            heard_s = now_s
            if cluster.is_over(job) or now_s >= read_at_s:
                with suppress(StoreError):
                    log = client.logs(name)
                    read_at_s = now_s + len(log) / READ_PER_S
                    if len(log) > printed:
                        print_result(log[printed:], end="")
                        printed = len(log)
            if cluster.is_over(job):
                return job
        except cluster.Unreachable:
            if now_s >= heard_s + SILENT_S:
                raise
        time.sleep(POLL_S)


def end_of(job: Any) -> tuple[int, str]:
    """The exit code of a job that is over, and what to tell the user beside the driver's own words."""
    status, code = str(job.status), job.driver_exit_code
    if status == "SUCCEEDED":
        return OK, ""
    if status == "STOPPED":
        return INTERRUPTED, "the job was stopped; submit it again to resume"
    if code in SEVEREST and code != OK:
        return code, ""
    if code is None:
        lines = [line.strip() for line in str(job.message or "").splitlines() if line.strip()]
        reason = " ".join([lines[0], lines[-1]] if len(lines) > 1 else lines) or "the cluster gives no reason"
        return UNEXPECTED, f"the job did not start, or its node was lost: {reason}; submit it again to resume"
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return UNEXPECTED, f"the driver's process ended with {ended}; submit it again to resume"


# ---- stop

SPARE_S = 30.0
"""Seconds beyond the time that a job has to stop, until the cluster must have said that it has ended."""


def stop(
    place: Place,
    address: str | None,
    *,
    overrides: Sequence[str] = (),
    logical_date: str | None = None,
    wait_s: float = 60.0,
) -> int:
    """Stop a job by its name, its run directory or its spec; without `address`, the driver on this machine. Returns 0 or 1.

    With `wait_s` 0 it returns as soon as the request is made.
    """
    target = place.url
    run = place.at(absolute(target.rstrip("/")))
    if target.endswith((".yaml", ".yml")) and is_local(target):
        spec = load_spec(target, overrides)
        if logical_date is not None:
            spec = with_logical_date(spec, logical_date)
        run = spec.place(absolute(at_date(spec, datetime.now(UTC)).output.path.rstrip("/")))
    if address is not None:
        is_stopped = stop_jobs(RayJobs(address), target, run.url, wait=wait_s > 0)
    elif target.startswith("draftmill-") and not Path(target).exists():
        raise UserError("missing; a submitted job is stopped by its cluster", field="--address")
    else:
        is_stopped = stop_driver(open_store(run), limit_s=wait_s) or not wait_s
    return OK if is_stopped else UNEXPECTED


def stop_jobs(client: RayJobs, target: str, run: str, *, wait: bool) -> bool:
    """Ask the jobs that a target means to end: the one of this name, or all of the run directory `run`.

    Returns whether all are over (True at once without `wait`); UserError if there is none.
    """
    known = client.jobs()
    jobs = [job for job in known if job.submission_id == target]
    jobs = jobs or [job for job in known if (job.metadata or {}).get(cluster.RUN) == run]
    if not jobs:
        raise UserError(f"{target!r} is no job of the cluster, and no run directory of one", field="TARGET")
    running = [job for job in jobs if not cluster.is_over(job)]
    if not running:
        _log.info(f"nothing to stop: {jobs[-1].submission_id} has ended ({jobs[-1].status})")
    limits_s = {}
    for job in running:
        variables = (job.runtime_env or {}).get("env_vars") or {}
        limit_s = float(variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3))  # before Ray kills the driver
        limits_s[job.submission_id] = limit_s + SPARE_S
        client.stop(job.submission_id)
        _log.info(f"stopping {job.submission_id}: running units may finish, within {limit_s:.0f} s")
    return not wait or all(_wait_for(client, name, limit_s) for name, limit_s in limits_s.items())


def _wait_for(client: RayJobs, name: str, limit_s: float) -> bool:
    """Wait until a job has ended, at most `limit_s`; returns whether it has."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if cluster.is_over(job := client.info(name)):
            _log.info(f"{name} has ended ({job.status})")
            return True
        time.sleep(POLL_S)
    _log.info(f"{name} has not ended within {limit_s:.0f} s")
    return False


def stop_driver(store: Store, *, limit_s: float) -> bool:
    """End the driver of this machine that holds the run directory; returns whether none holds it afterwards.

    UserError if the driver is on another machine, where only a cluster's address or a shell there can reach it.
    """
    lease = holder(store)
    if lease is None:
        _log.info(f"nothing to stop: no driver holds {store.url}")
        return True
    owner, pid = lease.owner, pid_here(lease.owner)
    if pid is None:
        raise UserError(
            f"the driver that holds {store.url} runs on {owner.partition(':')[0]} ({owner}); stop it there, or, if it "
            "was submitted to a cluster, give that cluster's --address",
            field="TARGET",
        )
    try:
        driver = psutil.Process(pid)
        if driver.create_time() > lease.expires_at_s - TTL_S:  # the number of a dead driver, given to another process
            raise UserError(f"process {pid} is not the driver that took the lease, which runs out", field="TARGET")
        driver.terminate()
    except psutil.AccessDenied:
        raise UserError(f"process {pid}, the driver, belongs to another user", field="TARGET") from None
    except psutil.NoSuchProcess:
        pass  # it has ended meanwhile
    _log.info(f"stopping the driver, process {pid}: running units may finish")
    until_s = time.monotonic() + limit_s
    while (left := holder(store)) is not None and left.owner == owner:
        if time.monotonic() >= until_s:
            _log.info(f"it has not ended within {limit_s:.0f} s")
            return False
        time.sleep(POLL_S)
    _log.info("it has ended")
    return True


# ---- what is sent to the cluster for a spec: the command of the driver, and its runtime environment
#
# Ray ships our package and a folder of the user's, and keeps them by their hash: an unchanged one is not sent again. A path of
# the spec means a file in the shipped folder, on storage that every node mounts, or in a bucket. One that the cluster could not
# resolve is refused, with its key, before anything is sent.

MARGIN_S = 15.0
"""Seconds between the driver's grace period and its end by force."""

MAX_SPEC = 64 * 1024
"""Characters of a spec: it travels in the command, which Linux limits to 128 KiB."""

_END = "END_OF_SPEC"

IMAGES = ("image_uri", "container")
"""Keys of a runtime environment that bring an image, which has draftmill."""

PACKAGE = "draftmill"
BUILTIN = "decoders/builtin"

EXCLUDES = ("__pycache__/", ".mypy_cache/", ".env", ".env.*", "*.pem", "*.key", ".aws/", ".ssh/", ".netrc")
"""Never shipped: what is made again, and files that usually hold secrets. Ray itself skips .git and virtual environments."""


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What the user wants of a submitted job, beside its spec. `run` are further options of `draftmill run`."""

    code: Literal["ship", "installed"] | None = None
    working_dir: str | None = None
    runtime_env: str | None = None
    shared: tuple[str, ...] = ()
    grace_s: float = 30.0
    run: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A job to submit: a command of sh, and a runtime_env of Ray."""

    entrypoint: str
    environment: Mapping[str, Any]


def request_of(spec: JobSpec, options: SubmitOptions) -> SubmitRequest:
    """The request for a spec; UserError for what the cluster could not find or would refuse."""
    given = {} if options.runtime_env is None else read_mapping(Path(options.runtime_env), "--runtime-env")
    variables = given.get("env_vars") or {}
    for name in variables:
        if is_secret_variable(str(name)):
            raise UserError(
                f"{name} would be readable for everyone who can see the cluster's jobs; set it on the cluster's nodes "
                "instead (on Kubernetes from a Secret)",
                field="--runtime-env",
            )
    folder = options.working_dir or given.get("working_dir")
    if folder is not None:
        given["working_dir"] = folder
    if folder is not None and "://" not in str(folder):
        folder = given["working_dir"] = os.path.abspath(os.path.expanduser(str(folder)))
        if not os.path.isdir(folder):
            raise UserError(f"{folder!r} is not a folder", field="--working-dir")
    else:
        folder = None  # none, or an archive that Ray fetches
    shared = [normal_folder(path, "--shared") for path in options.shared]
    text = json.dumps(spec_there(spec, folder, shared), indent=1, ensure_ascii=False)
    if len(text) > MAX_SPEC:
        raise UserError(f"a spec of {len(text):,} characters; the maximum is {MAX_SPEC:,}", field="SPEC")
    ships = options.code == "ship" or (options.code is None and not any(given.get(key) for key in IMAGES))
    given["env_vars"] = variables | {
        "PYTHONUNBUFFERED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": f"{options.grace_s + MARGIN_S:.0f}",  # Ray's own patience is 3 s
    }
    excludes = [*EXCLUDES, *(given.get("excludes") or [])]
    if ships:
        given["py_modules"] = [str(ROOT / PACKAGE), *(given.get("py_modules") or [])]
        excludes += _unused_models(text)
    if ships or "working_dir" in given:
        given["excludes"] = excludes
    command = "python -P -m draftmill.jobs.cli" if ships else "draftmill"
    run_options = shlex.join(["--ray-address", "auto", "--grace-seconds", f"{options.grace_s:g}", *options.run])
    # The shell becomes the driver, so that signals reach it.
    return SubmitRequest(
        f"folder=$(mktemp -d) && cat > \"$folder/job.yaml\" <<'{_END}' && "
        f'exec {command} run "$folder/job.yaml" {run_options}\n{text}\n{_END}',
        given,
    )


def _unused_models(spec: str) -> list[str]:
    """Patterns of the builtin models that a spec does not name: they are most of our package's bytes."""
    used = set(re.findall(r"builtin:([\w.-]+)", spec))
    folders = sorted(path.name for path in (ROOT / PACKAGE / BUILTIN).iterdir() if path.is_dir())
    return [f"/{BUILTIN}/{name}/" for name in folders if name not in used]


def normal_folder(path: str, field: str) -> str:
    """The normal form of an absolute path; UserError if it is not absolute."""
    if not os.path.isabs(path):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field=field)
    return os.path.normpath(path)


# ---- what the paths of a spec mean on the cluster

REMOTE = "s3://..., or a folder that every node of the cluster has under the same name (--shared FOLDER)"


def spec_there(spec: JobSpec, folder: str | None, shared: Sequence[str]) -> dict[str, Any]:
    """The keys of a spec with paths as the cluster finds them, in the shipped `folder` or a `shared` one.

    UserError for a path that can't be found there.
    """
    data = spec.model_dump(mode="json", exclude_unset=True)
    for found in places_of(spec):
        if found.value.startswith("memory://"):
            raise UserError(f"{found.value!r} ends with the driver; allowed: {REMOTE}", field=found.key)
        if found.is_here:
            inner: Any = data
            for key in found.keys[:-1]:
                inner = inner[key]
            inner[found.keys[-1]] = _path_there(found, folder, shared)
    return data


def _path_there(found: FoundPlace, folder: str | None, shared: Sequence[str]) -> str:
    value, field, here = found.value, found.key, os.path.abspath(os.path.expanduser(found.value))
    if any(is_inside(here, other) for other in shared):
        return here
    if field == "output.path":
        raise UserError(f"{value!r} is a folder of this machine; allowed: {REMOTE}", field=field)
    if folder is None or not is_inside(here, folder):
        shipped = "" if folder is None else f", which is not in the shipped folder {folder!r}"
        raise UserError(
            f"{value!r} is a path of this machine{shipped}; ship its folder (--working-dir), or use: {REMOTE}",
            field=field,
        )
    if not os.path.exists(here) and not glob.glob(here):
        raise UserError(f"{value!r} does not exist", field=field)
    return os.path.relpath(here, folder)
