"""Follows a submitted job: shows what it writes, until it has ended, and turns its end into an exit code."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from draftmill.jobs.exit_codes import INTERRUPTED, OK, SEVEREST, UNEXPECTED
from draftmill.jobs.submitting.client import JobClient, Unreachable
from draftmill.jobs.submitting.names import is_over
from draftmill.storage.errors import StoreError

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

    def __init__(self, client: JobClient, name: str) -> None:
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

    client: JobClient
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
