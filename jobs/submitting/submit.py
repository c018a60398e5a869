"""`draftmill submit`: runs a spec on a cluster through Ray's job API, follows it, and returns the driver's own exit code.

The same command again follows the job while it runs; when it has ended, it starts the next one, which resumes the run.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import draftmill
from draftmill.jobs.driving.driver import interruptible
from draftmill.jobs.exit_codes import INTERRUPTED, OK, SEVEREST, UNEXPECTED
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.spec.dated_path import has_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date, check_overridden, with_logical_date
from draftmill.jobs.spec.spec_file import read_mapping
from draftmill.jobs.submitting.cluster import (
    FIELD,
    RUN,
    SPEC,
    Exists,
    NotReady,
    RayJobs,
    Unreachable,
    digest_of,
    is_over,
    next_name,
    numbered,
    run_of,
    say,
    stem_of,
)
from draftmill.jobs.submitting.request import Request, SubmitOptions, request_of
from draftmill.storage.errors import StoreError, UserError

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
POLL_S = 1.0
AGAIN_PER_S = 1_000_000
"""Characters of log that broken connections may bring again per second on average: a long log waits for its next connection,
so that what is read grows with the time, not with its square."""

SILENT_S = 60.0
"""Seconds without any answer of the cluster after which it counts as lost: as long as a driver waits for a lost head."""


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended: draftmill's exit code, and what to tell the user beside the job's own words."""

    code: int
    message: str = ""


def end_of(info: Any) -> End:
    """The end of a job that is over. The driver's own exit code is handed on; it has said why."""
    status, code = str(info.status), info.driver_exit_code
    if status == "SUCCEEDED":
        return End(OK)
    if status == "STOPPED":
        return End(INTERRUPTED, "the job was stopped; submit it again to resume")
    if code in SEVEREST and code != OK:
        return End(code)
    if code is None:
        lines = [line.strip() for line in str(info.message or "").splitlines() if line.strip()]
        reason = " ".join([lines[0], lines[-1]] if len(lines) > 1 else lines) or "the cluster gives no reason"
        return End(UNEXPECTED, f"the job did not start, or its node was lost: {reason}; submit it again to resume")
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return End(UNEXPECTED, f"the driver's process ended with {ended}; submit it again to resume")


class LogTail(threading.Thread):
    """Reads a job's log as it is written, in a thread that ends with the process; `taken` hands over what has come."""

    def __init__(self, client: RayJobs, name: str) -> None:
        super().__init__(name="log", daemon=True)
        self._client, self._job = client, name
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Read until the connection ends, for whatever reason; the follower opens another one."""
        with suppress(Exception):
            asyncio.run(self._read())

    async def _read(self) -> None:
        async for text in self._client.tail(self._job):
            self._texts.put(text)

    def taken(self) -> str:
        """What has come since the last call."""
        texts: list[str] = []
        with suppress(queue.Empty):
            while True:
                texts.append(self._texts.get_nowait())
        return "".join(texts)


@dataclass(slots=True)
class Follower:
    """Shows a job's log through `show` until the job is over. Texts that a broken connection repeats are shown once."""

    client: RayJobs
    name: str
    show: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    _shown: int = 0
    _skip: int = 0
    _opened_s: float = 0.0

    def follow(self) -> End:
        """Return when the job is over; Unreachable if the cluster is silent for SILENT_S."""
        tail = self._opened()
        while True:
            self._take(tail)
            info = self._info()
            if info is not None and is_over(info):
                tail.join(timeout=POLL_S)
                self._take(tail)
                self._show_rest()
                return end_of(info)
            if not tail.is_alive():
                self._take(tail)
                if self.clock() - self._opened_s >= self._shown / AGAIN_PER_S:
                    tail = self._opened()
            self.wait(POLL_S)

    def _opened(self) -> LogTail:
        """A new connection, which brings the whole log again: Ray's job API can't begin in its middle."""
        self._skip, self._opened_s = self._shown, self.clock()
        return LogTail(self.client, self.name)

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

    def _take(self, tail: LogTail) -> None:
        text = tail.taken()
        new = text[self._skip :]
        self._skip = max(0, self._skip - len(text))
        self._add(new)

    def _show_rest(self) -> None:
        """Show what the connection did not bring."""
        with suppress(StoreError):
            self._add(self.client.logs(self.name)[self._shown :])

    def _add(self, text: str) -> None:
        if text:
            self._shown += len(text)
            self.show(text)


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
    if has_date(spec.output.path):  # the one reading of the clock: the driver gets the date with the spec
        spec = at_date(spec, datetime.now(UTC))
        data["output"]["logical_date"] = spec.output.logical_date
    request = request_of(data, options)
    client = RayJobs(address)
    name = start(client, spec, request)
    if not wait:
        print(name)
        return OK
    return follow(client, name)


def start(client: RayJobs, spec: JobSpec, request: Request) -> str:
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
            _send(client, name, request, metadata)
        except Exists:  # another submission of the same run was faster
            continue
        return name


def _say_running(job: Any, metadata: dict[str, str]) -> None:
    other = (job.metadata or {}).get(SPEC) != metadata[SPEC]
    changed = "; it was submitted with other settings, which stay in force until it has ended" if other else ""
    say(f"{job.submission_id} runs already for this run directory{changed}")


def _send(client: RayJobs, name: str, request: Request, metadata: dict[str, str]) -> None:
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
    say(f"submitted {name} to {client.cluster.url} (Ray {client.cluster.ray}; {what})")


def follow(client: RayJobs, name: str) -> int:
    """Show the job's log until it has ended; returns its exit code. An interrupt ends the following, not the job."""
    try:
        with interruptible():
            end = Follower(client, name, _show).follow()
    except KeyboardInterrupt:
        say(
            f"not following any more; {name} goes on. Follow it again: the same command. "
            f"Stop it: draftmill stop {name} --address {client.cluster.url}"
        )
        return INTERRUPTED
    except Unreachable as error:
        raise Unreachable(
            f"{error}; what became of {name} is unknown: submit it again to follow or resume it"
        ) from None
    if end.message:
        say(end.message)
    return end.code


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
