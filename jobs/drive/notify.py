"""Sends notices about a run to commands: at its end, and when it stalls. Best effort.

A notice changes no exit code. It delays the end by at most TIMEOUT_S: then the command is killed with all its processes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from draftmill.jobs.config.sections import NotifySettings
from draftmill.jobs.drive.driver import Watcher
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.storage.errors import UserError
from draftmill.storage.secrets import presentable

TIMEOUT_S = 10.0
"""Seconds that a command has for a notice."""

STALL_S = 1800.0
"""Seconds without progress after which a run stalls."""

SLACK_S = 1.0
"""Seconds beyond the timeout to wait for a command's thread: it has to kill and to report."""

MOST_GAP_S = 10.0
"""Seconds between two looks that count as a stall, at most: in a longer gap the driver itself was suspended."""

SHOWN_CHARS = 200
SHOWN_COMMAND_CHARS = 60

Notice = Mapping[str, Any]
Tell = Callable[[str], None]


def check_receivers(receivers: Sequence[NotifySettings]) -> None:
    """Raise UserError if a command is not there."""
    for number, receiver in enumerate(receivers):
        if shutil.which(receiver.command[0]) is None:
            hint = "; write its words as a list" if len(receiver.command) == 1 and " " in receiver.command[0] else ""
            raise UserError(f"{receiver.command[0]!r} is not a command here{hint}", field=f"notify.{number}.command")


def send(
    receivers: Sequence[NotifySettings], event: str, notice: Notice, tell: Tell, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Send a notice to all that ask for this event, side by side; returns when they have it, or `timeout_s` is over.

    `tell` gets a message for each that failed.
    """
    data = json.dumps({"event": event, **notice}, default=str).encode()
    until_s = time.monotonic() + timeout_s + SLACK_S
    threads = []
    for receiver in receivers:
        if event in receiver.on:
            arguments = (receiver, data, timeout_s, tell)
            threads.append((threading.Thread(target=_send_one, args=arguments, name="notify", daemon=True), receiver))
            threads[-1][0].start()
    for thread, receiver in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            tell(f"notify: {text_of(receiver)} did not take the notice in time")


def _send_one(receiver: NotifySettings, data: bytes, timeout_s: float, tell: Tell) -> None:
    try:
        problem = _run(receiver, data, timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever error a notice has, the run's end stays the same
        problem = getattr(error, "strerror", None) or type(error).__name__
    if problem:
        tell(presentable(f"notify: {text_of(receiver)}: {problem}"))


def text_of(receiver: NotifySettings) -> str:
    """The receiver as messages name it."""
    text = shlex.join(receiver.command)
    return f"command {text if len(text) <= SHOWN_COMMAND_CHARS else text[:SHOWN_COMMAND_CHARS] + '...'}"


def _run(receiver: NotifySettings, data: bytes, timeout_s: float) -> str | None:
    """Run a command with the notice as its input; returns why it failed."""
    with tempfile.TemporaryFile() as notice, tempfile.TemporaryFile() as errors:  # pipes would wait for its children
        notice.write(data)
        notice.seek(0)
        process = subprocess.Popen(
            receiver.command, stdin=notice, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {timeout_s:g} s"
        if code == 0:
            return None
        errors.seek(0)
        last = (errors.read()[-4096:].decode(errors="replace").strip().splitlines() or [""])[-1][:SHOWN_CHARS]
        return f"exit code {code}" + (f": {last}" if last else "")


class StallWatcher(Watcher):
    """Sends a notice when the run has made no progress for STALL_S; once, until it makes progress again."""

    name = "stall notices"

    def __init__(
        self,
        receivers: Sequence[NotifySettings],
        notice: Callable[[Totals, float], Notice],
        tell: Tell,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receivers, self._notice, self._tell, self._clock = receivers, notice, tell, clock
        self._looked_s = clock()
        self._still_s = 0.0
        self._before: tuple[int, ...] = ()
        self._is_sent = False

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        now_s = self._clock()
        self._still_s += min(MOST_GAP_S, max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        moved = (totals.tokens, totals.rows_done, totals.units_done)
        if moved != self._before:
            self._before, self._still_s, self._is_sent = moved, 0.0, False
        if self._still_s >= STALL_S and not self._is_sent:
            self._is_sent = True
            notice = self._notice(totals, self._still_s)
            arguments = (self._receivers, "stall", notice, self._tell)
            threading.Thread(target=send, args=arguments, name="notify", daemon=True).start()
