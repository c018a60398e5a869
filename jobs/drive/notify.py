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
from draftmill.storage.errors import UserError
from draftmill.storage.secrets import presentable

TIMEOUT_S = 10.0
"""Seconds that a command has for a notice."""

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
    until_s = time.monotonic() + timeout_s + 1.0  # a command's thread has to kill and to report
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
