"""`draftmill submit`: runs a spec on a cluster through Ray's job API, follows it, and returns the driver's own exit code.

The same command again follows the job while it runs; when it has ended, it starts the next one, which resumes the run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import draftmill
from draftmill.jobs.driving.driver import interruptible
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.spec.dated_path import has_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date, check_overridden, with_logical_date
from draftmill.jobs.spec.spec_file import read_mapping
from draftmill.jobs.submitting.address import FIELD, Cluster, reached
from draftmill.jobs.submitting.client import Exists, JobClient, NotReady, RayJobs, Unreachable
from draftmill.jobs.submitting.following import POLL_S, Follower
from draftmill.jobs.submitting.names import RUN, SPEC, digest_of, is_over, next_name, numbered, run_of, stem_of
from draftmill.jobs.submitting.request import Request, SubmitOptions, request_of
from draftmill.jobs.submitting.tokens import token_headers
from draftmill.storage.errors import UserError

READY_S = 60.0
"""How long a cluster that has just started may take until it accepts jobs."""


def submit(
    path: str,
    overrides: Sequence[str],
    address: str,
    options: SubmitOptions,
    *,
    logical_date: str | None = None,
    wait: bool = True,
) -> int:
    """Submit a spec and follow it, or follow the job that runs for the same run directory; returns the exit code.

    Without `wait`, prints the job's name and returns 0 once the cluster has it. UserError if the spec can't run there.
    """
    data = {"name": Path(path).stem} | read_mapping(Path(path))
    spec = check_overridden(data, overrides)
    if logical_date is not None:
        spec = with_logical_date(spec, logical_date)
    if has_date(spec.output.path):  # the one reading of the clock: the driver gets the date with the spec
        spec = at_date(spec, datetime.now(UTC))
        data["output"]["logical_date"] = spec.output.logical_date
    request = request_of(data, options)
    headers = token_headers()
    cluster = reached(address, headers)
    client = RayJobs(cluster, headers)
    name = started(client, cluster, spec, request)
    if not wait:
        print(name)
        return OK
    return followed(client, cluster, name)


def started(client: JobClient, cluster: Cluster, spec: JobSpec, request: Request) -> str:
    """The name of the job that runs for the spec's run directory: one that is there already, or a new one."""
    run = run_of(spec)
    stem = stem_of(spec.name, run, spec.s3.endpoint)
    metadata = {
        RUN: run,
        SPEC: digest_of(request.entrypoint, str(request.environment)),
        "draftmill": draftmill.__version__,
    }
    while True:
        jobs = client.jobs()
        running = [job for _, job in numbered(stem, jobs) if not is_over(job)]
        if running:
            _say_running(running[-1], metadata)
            return str(running[-1].submission_id)
        name = next_name(stem, jobs)
        try:
            _send(client, cluster, name, request, metadata)
        except Exists:  # another submission of the same run was faster
            continue
        return name


def _say_running(job: Any, metadata: dict[str, str]) -> None:
    other = (job.metadata or {}).get(SPEC) != metadata[SPEC]
    changed = "; it was submitted with other settings, which stay in force until it has ended" if other else ""
    _say(f"{job.submission_id} runs already for this run directory{changed}")


def _send(client: JobClient, cluster: Cluster, name: str, request: Request, metadata: dict[str, str]) -> None:
    environment = dict(request.environment)
    with tempfile.TemporaryDirectory(prefix="draftmill-") as folder:
        what = "nothing is shipped"
        if request.shipment.files:
            package = Path(folder) / "package.zip"
            request.shipment.write(package)
            environment["working_dir"] = str(package)
            what = f"{counted(len(request.shipment.files), 'file')}, {size_text(package.stat().st_size)}"
        until_s = time.monotonic() + READY_S
        while True:
            try:
                client.submit(name, request.entrypoint, environment, metadata=metadata, **request.rest)
                break
            except NotReady:
                if time.monotonic() > until_s:
                    raise
                time.sleep(POLL_S)
    _say(f"submitted {name} to {cluster.url} (Ray {cluster.ray}; {what})")


def followed(client: JobClient, cluster: Cluster, name: str) -> int:
    """Show the job's log until it has ended; returns its exit code. An interrupt ends the following, not the job."""
    try:
        with interruptible():
            end = Follower(client, name, _show).follow()
    except KeyboardInterrupt:
        _say(
            f"not following any more; {name} goes on. Follow it again: the same command. "
            f"Stop it: draftmill stop {name} --address {cluster.url}"
        )
        return INTERRUPTED
    except Unreachable as error:
        raise Unreachable(
            f"{error}; what became of {name} is unknown: submit it again to follow or resume it"
        ) from None
    if end.message:
        _say(end.message)
    return end.code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(message: str) -> None:
    print(f"draftmill: {message}", file=sys.stderr, flush=True)


def address_of(given: str | None, default: str | None) -> str:
    """The address on the command line, else Ray's own variable; UserError if there is neither."""
    address = given or default
    if not address:
        raise UserError("missing; allowed: http://HOST:8265, or set RAY_API_SERVER_ADDRESS", field=FIELD)
    return address
