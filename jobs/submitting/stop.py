"""`draftmill stop`: ends a submitted job, or the driver of this machine that works on a run directory. Both can be resumed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from draftmill.jobs.driving.leases import TTL_S
from draftmill.jobs.exit_codes import OK, UNEXPECTED
from draftmill.jobs.plan.worker_job import absolute
from draftmill.jobs.spec.dated_path import has_date
from draftmill.jobs.spec.job_spec import at_date, load_spec, with_logical_date
from draftmill.jobs.submitting.cluster import (
    RUN,
    NoSuchJob,
    RayJobs,
    is_over,
    run_of,
    say,
)
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.runs.lease import LeaseHeld, holder, pid_here
from draftmill.storage.stores.interface import S3Options, Store, is_local
from draftmill.storage.stores.store import open_store

POLL_S = 0.5
SPARE_S = 30.0
"""Seconds beyond the time that a job has to stop, until the cluster must have said that it has ended."""

Say = Callable[[str], None]


def jobs_of(client: RayJobs, target: str, run: str | None) -> list[Any]:
    """The cluster's jobs that a target means: the one of this name, or all of the run directory `run`; UserError if none."""
    jobs = client.jobs()
    named = [job for job in jobs if job.submission_id == target]
    found = named or [job for job in jobs if run is not None and (job.metadata or {}).get(RUN) == run]
    if not found:
        raise UserError(f"{target!r} is no job of the cluster, and no run directory of one", field="TARGET")
    return found


def stop_jobs(client: RayJobs, jobs: Sequence[Any], say: Say, *, wait: bool) -> bool:
    """Ask the jobs that are not over to end; returns whether all are over (True at once without `wait`)."""
    running = [job for job in jobs if not is_over(job)]
    if not running:
        say(f"nothing to stop: {jobs[-1].submission_id} has ended ({jobs[-1].status})")
    for job in running:
        client.stop(str(job.submission_id))
        say(f"stopping {job.submission_id}: running units may finish, within {_patience_s(job):.0f} s")
    return not wait or all(_ends(client, str(job.submission_id), _patience_s(job) + SPARE_S, say) for job in running)


def _patience_s(job: Any) -> float:
    """Seconds from the request to stop until Ray kills the driver."""
    variables = (job.runtime_env or {}).get("env_vars") or {}
    try:
        return float(variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3))
    except ValueError:
        return 3.0


def _ends(client: RayJobs, name: str, limit_s: float, say: Say) -> bool:
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        try:
            job = client.info(name)
        except NoSuchJob:
            return True
        if is_over(job):
            say(f"{name} has ended ({job.status})")
            return True
        time.sleep(POLL_S)
    say(f"{name} has not ended within {limit_s:.0f} s")
    return False


def stop_driver(store: Store, say: Say, *, limit_s: float) -> bool:
    """End the driver of this machine that holds the run directory; returns whether none holds it afterwards.

    UserError if the driver is on another machine, where only a cluster's address or a shell there can reach it.
    """
    found = holder(store)
    if found is None:
        say(f"nothing to stop: no driver holds {store.url}")
        return True
    pid = pid_here(found.owner)
    if pid is None:
        host = found.owner.partition(":")[0]
        raise UserError(
            f"the driver that holds {store.url} runs on {host} ({found.owner}); stop it there, or, if it "
            "was submitted to a cluster, give that cluster's --address",
            field="TARGET",
        )
    _signal(found, pid)
    say(f"stopping the driver, process {pid}: running units may finish")
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        left = holder(store)
        if left is None or left.owner != found.owner:
            say("it has ended")
            return True
        time.sleep(POLL_S)
    say(f"it has not ended within {limit_s:.0f} s")
    return False


def _signal(found: LeaseHeld, pid: int) -> None:
    try:
        began_s = psutil.Process(pid).create_time()
        if began_s > found.expires_at_s - TTL_S:  # the number of a dead driver, given to another process
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


def stop(
    target: str,
    address: str | None,
    *,
    overrides: Sequence[str] = (),
    logical_date: str | None = None,
    wait_s: float = 60.0,
    s3: S3Options | None = None,
) -> int:
    """Stop a job by its name, its run directory or its spec; without `address`, the driver on this machine. Returns 0 or 1.

    With `wait_s` 0 it returns as soon as the request is made.
    """
    run, options = _run_of(target, overrides, logical_date, s3)
    if address is None:
        if target.startswith("draftmill-") and not Path(target).exists():
            raise UserError("missing; a submitted job is stopped by its cluster", field="--address")
        is_over = stop_driver(open_store(run, s3=options), say, limit_s=wait_s) or not wait_s
    else:
        client = RayJobs(address)
        is_over = stop_jobs(client, jobs_of(client, target, run), say, wait=wait_s > 0)
    return OK if is_over else UNEXPECTED


def _run_of(
    target: str, overrides: Sequence[str], logical_date: str | None, s3: S3Options | None
) -> tuple[str, S3Options | None]:
    """The run directory that a target means, and how its store is reached."""
    if target.endswith((".yaml", ".yml")) and is_local(target):
        spec = load_spec(target, overrides)
        if logical_date is not None:
            spec = with_logical_date(spec, logical_date)
        if has_date(spec.output.path):
            spec = at_date(spec, datetime.now(UTC))
        return run_of(spec), spec.s3.options()
    return absolute(target.rstrip("/")), s3
