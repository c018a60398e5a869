"""`draftmill submit` runs a spec on a cluster through Ray's job API, follows it, and returns the driver's own exit code.

The same command again follows the job while it runs; when it has ended, it starts the next one, which resumes the run.
`draftmill stop` ends such a job, or the driver of this machine that works on a run directory; both can be resumed.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from draftmill.jobs.config.dates import has_date
from draftmill.jobs.config.paths import absolute
from draftmill.jobs.config.spec import JobSpec, at_date, check_overridden, load_spec, with_logical_date
from draftmill.jobs.config.yaml_file import read_mapping
from draftmill.jobs.drive.driver import interruptible
from draftmill.jobs.drive.leases import TTL_S
from draftmill.jobs.drive.log import print_result
from draftmill.jobs.exit_codes import INTERRUPTED, OK, SEVEREST, UNEXPECTED
from draftmill.jobs.remote.cluster import (
    FIELD,
    RUN,
    SPEC,
    JobExists,
    NoSuchJob,
    NotReady,
    RayJobs,
    Unreachable,
    digest_of,
    is_over,
    next_name,
    run_of,
    stem_of,
    submissions,
)
from draftmill.jobs.remote.request import SubmitOptions, SubmitRequest, request_of
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.lease import LeaseHeld, holder, pid_here
from draftmill.storage.stores.interface import Place, Store, is_local
from draftmill.storage.stores.store import open_store
from draftmill.version import __version__

_log = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
POLL_S = 1.0
READ_PER_S = 200_000
"""Most characters of log that are read per second on average: a long log is read less often."""

SILENT_S = 60.0
"""Seconds without any answer of the cluster after which it counts as lost: as long as a driver waits for a lost head."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: draftmill's exit code, and what to tell the user beside the job's own words."""

    code: int
    message: str = ""


def end_of(info: Any) -> JobEnd:
    """The end of a job that is over. The driver's own exit code is handed on; it has said why."""
    status, code = str(info.status), info.driver_exit_code
    if status == "SUCCEEDED":
        return JobEnd(OK)
    if status == "STOPPED":
        return JobEnd(INTERRUPTED, "the job was stopped; submit it again to resume")
    if code in SEVEREST and code != OK:
        return JobEnd(code)
    if code is None:
        lines = [line.strip() for line in str(info.message or "").splitlines() if line.strip()]
        reason = " ".join([lines[0], lines[-1]] if len(lines) > 1 else lines) or "the cluster gives no reason"
        return JobEnd(UNEXPECTED, f"the job did not start, or its node was lost: {reason}; submit it again to resume")
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return JobEnd(UNEXPECTED, f"the driver's process ended with {ended}; submit it again to resume")


@dataclass(slots=True)
class LogFollower:
    """Prints a job's log through `show` until the job is over: each text once, although each request brings the whole log."""

    client: RayJobs
    name: str
    show: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _shown: int = 0
    _next_s: float = 0.0

    def follow(self) -> JobEnd:
        """Return when the job is over; Unreachable if the cluster is silent for SILENT_S."""
        while True:
            info = self._info()
            if is_over(info) or self.clock() >= self._next_s:
                with suppress(StoreError):
                    self._read_log()
            if is_over(info):
                return end_of(info)
            self.wait(POLL_S)

    def _info(self) -> Any:
        """The job's state; asks again while the cluster does not answer."""
        until_s = self.clock() + SILENT_S
        while True:
            try:
                return self.client.info(self.name)
            except Unreachable:
                if self.clock() >= until_s:
                    raise
                self.wait(POLL_S)

    def _read_log(self) -> None:
        log = self.client.logs(self.name)
        self._next_s = self.clock() + len(log) / READ_PER_S
        if new := log[self._shown :]:
            self._shown = len(log)
            self.show(new)


SHIPPED = ("working_dir", "py_modules", "excludes")
"""Keys of a runtime environment that name folders of this machine: no part of a job's settings."""

READY_S = 60.0
"""How long a cluster that has just started may take until it accepts jobs."""


def submit(
    path: str,
    overrides: Sequence[str],
    address: str | None,
    options: SubmitOptions,
    *,
    logical_date: str | None = None,
    wait: bool = True,
) -> int:
    """Submit a spec and follow it, or follow the job that runs for the same run directory; returns the exit code.

    `address` None: that of RAY_API_SERVER_ADDRESS. Without `wait`, prints the job's name and returns 0 once the cluster has it.
    UserError if the spec can't run there.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise UserError(f"missing; allowed: http://HOST:8265, or set {ADDRESS_VARIABLE}", field=FIELD)
    data = {"name": Path(path).stem} | read_mapping(Path(path))
    spec = check_overridden(data, overrides)
    if logical_date is not None:
        spec = with_logical_date(spec, logical_date)
    if has_date(spec.output.path):
        spec = at_date(spec, datetime.now(UTC))
        data["output"]["logical_date"] = spec.output.logical_date  # the driver does not read the clock again
    request = request_of(data, options)
    client = RayJobs(address)
    name = start(client, spec, request)
    if not wait:
        print_result(name)
        return OK
    return follow(client, name)


def start(client: RayJobs, spec: JobSpec, request: SubmitRequest) -> str:
    """The name of the job that runs for the spec's run directory: one that is there already, or a new one."""
    run = run_of(spec)
    stem = stem_of(spec.name, run, spec.s3.endpoint)
    settings = {key: value for key, value in request.environment.items() if key not in SHIPPED}
    digest = digest_of(request.entrypoint, str(settings))
    metadata = {RUN: run, SPEC: digest, "draftmill": __version__}
    while True:
        jobs = client.jobs()
        running = [job for _, job in submissions(stem, jobs) if not is_over(job)]
        if running:
            other = (running[-1].metadata or {}).get(SPEC) != digest
            changed = "; it was submitted with other settings, which stay in force until it has ended" if other else ""
            _log.info(f"{running[-1].submission_id} runs already for this run directory{changed}")
            return str(running[-1].submission_id)
        name = next_name(stem, jobs)
        with suppress(JobExists):  # another submission of the same run was faster
            _send(client, name, request, metadata)
            return name


def _send(client: RayJobs, name: str, request: SubmitRequest, metadata: dict[str, str]) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        try:
            client.submit(name, request.entrypoint, request.environment, metadata=metadata)
            break
        except NotReady:
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)
    _log.info(f"submitted {name} to {client.cluster.url} (Ray {client.cluster.ray})")


def follow(client: RayJobs, name: str) -> int:
    """Show the job's log until it has ended; returns its exit code. An interrupt ends the following, not the job."""
    try:
        with interruptible():
            end = LogFollower(client, name, partial(print_result, end="")).follow()
    except KeyboardInterrupt:
        _log.info(
            f"not following any more; {name} goes on. Follow it again: the same command. "
            f"Stop it: draftmill stop {name} --address {client.cluster.url}"
        )
        return INTERRUPTED
    except Unreachable as error:
        raise Unreachable(
            f"{error}; what became of {name} is unknown: submit it again to follow or resume it"
        ) from None
    if end.message:
        _log.info(end.message)
    return end.code


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
        run = spec.place(run_of(at_date(spec, datetime.now(UTC))))
    if address is None:
        if target.startswith("draftmill-") and not Path(target).exists():
            raise UserError("missing; a submitted job is stopped by its cluster", field="--address")
        is_stopped = stop_driver(open_store(run), limit_s=wait_s) or not wait_s
    else:
        client = RayJobs(address)
        is_stopped = stop_jobs(client, jobs_of(client, target, run.url), wait=wait_s > 0)
    return OK if is_stopped else UNEXPECTED


def jobs_of(client: RayJobs, target: str, run: str | None) -> list[Any]:
    """The cluster's jobs that a target means: the one of this name, or all of the run directory `run`; UserError if none."""
    jobs = client.jobs()
    matches = [job for job in jobs if job.submission_id == target]
    matches = matches or [job for job in jobs if run is not None and (job.metadata or {}).get(RUN) == run]
    if not matches:
        raise UserError(f"{target!r} is no job of the cluster, and no run directory of one", field="TARGET")
    return matches


def stop_jobs(client: RayJobs, jobs: Sequence[Any], *, wait: bool) -> bool:
    """Ask the jobs that are not over to end; returns whether all are over (True at once without `wait`)."""
    running = {str(job.submission_id): _patience_s(job) for job in jobs if not is_over(job)}
    if not running:
        _log.info(f"nothing to stop: {jobs[-1].submission_id} has ended ({jobs[-1].status})")
    for name, patience_s in running.items():
        client.stop(name)
        _log.info(f"stopping {name}: running units may finish, within {patience_s:.0f} s")

    def end(name: str) -> str | None:
        try:
            job = client.info(name)
        except NoSuchJob:
            return ""
        return f"{name} has ended ({job.status})" if is_over(job) else None

    return not wait or all(
        _wait_for(partial(end, name), name, patience_s + SPARE_S) for name, patience_s in running.items()
    )


def _patience_s(job: Any) -> float:
    """Seconds from the request to stop until Ray kills the driver."""
    variables = (job.runtime_env or {}).get("env_vars") or {}
    try:
        return float(variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3))
    except ValueError:
        return 3.0


def _wait_for(end: Callable[[], str | None], name: str, limit_s: float) -> bool:
    """Ask until `end` is a text, which is printed; False if it is None for `limit_s`."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if (message := end()) is not None:
            if message:
                _log.info(message)
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
    _signal(lease, pid)
    _log.info(f"stopping the driver, process {pid}: running units may finish")

    def end() -> str | None:
        left = holder(store)
        return "it has ended" if left is None or left.owner != owner else None

    return _wait_for(end, "it", limit_s)


def _signal(lease: LeaseHeld, pid: int) -> None:
    try:
        began_s = psutil.Process(pid).create_time()
        if began_s > lease.expires_at_s - TTL_S:  # the number of a dead driver, given to another process
            raise UserError(
                f"process {pid} is not the driver that took the lease; it runs out by itself", field="TARGET"
            )
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"process {pid}, the driver, belongs to another user", field="TARGET") from None
    except psutil.Error as error:
        raise StoreError(f"process {pid}, the driver, can't be seen: {error}") from None
    except ProcessLookupError:
        return
