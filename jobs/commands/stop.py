"""`draftmill stop`: ends a submitted job, or the driver of this machine that works on a run directory. Both can be resumed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from draftmill.jobs.exit_codes import OK, UNEXPECTED
from draftmill.jobs.plan.worker_job import absolute
from draftmill.jobs.spec.dated_path import has_date
from draftmill.jobs.spec.job_spec import at_date, load_spec, with_logical_date
from draftmill.jobs.submitting.address import reached
from draftmill.jobs.submitting.client import RayJobs
from draftmill.jobs.submitting.names import run_of
from draftmill.jobs.submitting.stopping import jobs_of, stop_driver, stop_jobs
from draftmill.jobs.submitting.tokens import token_headers
from draftmill.storage.errors import UserError
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store


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
        is_over = stop_driver(open_store(run, s3=options), _say, limit_s=wait_s) or not wait_s
    else:
        headers = token_headers()
        client = RayJobs(reached(address, headers), headers)
        is_over = stop_jobs(client, jobs_of(client, target, run), _say, wait=wait_s > 0)
    return OK if is_over else UNEXPECTED


def _run_of(
    target: str, overrides: Sequence[str], logical_date: str | None, s3: S3Options | None
) -> tuple[str, S3Options | None]:
    """The run directory that a target means, and how its store is reached."""
    if target.endswith((".yaml", ".yml")) and "://" not in target:
        spec = load_spec(target, overrides)
        if logical_date is not None:
            spec = with_logical_date(spec, logical_date)
        if has_date(spec.output.path):
            spec = at_date(spec, datetime.now(UTC))
        return run_of(spec), spec.s3.options()
    return absolute(target.rstrip("/")), s3


def _say(message: str) -> None:
    print(f"draftmill: {message}", file=sys.stderr, flush=True)
