"""Sends notices about a run to commands and webhooks: at its end, and when it stalls. Best effort.

A notice changes no exit code. It delays the end by at most its `timeout_s`: then a command is killed with all its processes, and
a webhook is given up. Environment variables are put in when it is sent; their values are in no message.
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
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from draftmill.jobs.driving.driver import Watcher
from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.spec.notify_settings import VARIABLE, NotifySettings
from draftmill.storage.errors import UserError
from draftmill.storage.secrets import HIDDEN, presentable

TRIES = 3
"""Attempts to reach a webhook, within its time."""

RETRY_S = 1.0
SLACK_S = 1.0
"""Seconds beyond `timeout_s` to wait for a receiver's thread: it has to kill and to report."""

MOST_GAP_S = 10.0
"""Seconds between two looks that count as a stall, at most: in a longer gap the driver itself was suspended."""

SHOWN_CHARS = 200
SHOWN_COMMAND_CHARS = 60

Notice = Mapping[str, Any]
Tell = Callable[[str], None]


def check_receivers(receivers: Sequence[NotifySettings]) -> None:
    """Raise UserError if a command is not there or an environment variable is not set."""
    for number, receiver in enumerate(receivers):
        if receiver.command is not None and shutil.which(receiver.command[0]) is None:
            hint = "; write its words as a list" if len(receiver.command) == 1 and " " in receiver.command[0] else ""
            raise UserError(f"{receiver.command[0]!r} is not a command here{hint}", field=f"notify.{number}.command")
        for place, text in places_of(receiver):
            for name in VARIABLE.findall(text):
                if not os.environ.get(name):
                    raise UserError(f"the environment variable {name} is not set", field=f"notify.{number}.{place}")


def places_of(receiver: NotifySettings) -> list[tuple[str, str]]:
    """The texts of a receiver in which environment variables are put in, each with its key."""
    return [
        ("webhook", receiver.webhook or ""),
        *((f"headers.{name}", value) for name, value in receiver.headers.items()),
    ]


def send(receivers: Sequence[NotifySettings], event: str, notice: Notice, tell: Tell, *, most_s: float = 300.0) -> None:
    """Send a notice to all that ask for this event, side by side; returns when they have it, or their time is over.

    `tell` gets a message for each that failed. `most_s` bounds every timeout.
    """
    data = json.dumps({"event": event, **notice}, default=str).encode()
    threads = []

    def tell_hidden(message: str) -> None:
        tell(presentable(_without_values(receivers, message)))

    for receiver in receivers:
        if event in receiver.on:
            allowed_s = min(receiver.timeout_s, most_s)
            thread = threading.Thread(
                target=_send_one, args=(receiver, data, allowed_s, tell_hidden), name="notify", daemon=True
            )
            thread.start()
            threads.append((thread, receiver, time.monotonic() + allowed_s + SLACK_S))
    for thread, receiver, until_s in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            tell(f"notify: {text_of(receiver)} did not take the notice in time")


def _send_one(receiver: NotifySettings, data: bytes, allowed_s: float, tell: Tell) -> None:
    try:
        problem = _run(receiver, data, allowed_s) if receiver.command is not None else _post(receiver, data, allowed_s)
    except Exception as error:  # noqa: BLE001 - whatever error a notice has, the run's end stays the same
        problem = reason_of(error)
    if problem:
        tell(f"notify: {text_of(receiver)}: {problem}")


def text_of(receiver: NotifySettings) -> str:
    """The receiver as messages name it: as in the spec, without the values of variables."""
    if receiver.command is None:
        return f"webhook {receiver.webhook}"
    text = shlex.join(receiver.command)
    return f"command {text if len(text) <= SHOWN_COMMAND_CHARS else text[:SHOWN_COMMAND_CHARS] + '...'}"


def _without_values(receivers: Sequence[NotifySettings], text: str) -> str:
    """The text without the values of the receivers' variables: a command may print that of a webhook, too."""
    places = [place for receiver in receivers for _, place in places_of(receiver)]
    for name in (name for place in places for name in VARIABLE.findall(place)):
        text = text.replace(os.environ.get(name) or HIDDEN, HIDDEN)
    return text


def _fill(text: str) -> str:
    return VARIABLE.sub(lambda variable: os.environ.get(variable[1], ""), text)


def _run(receiver: NotifySettings, data: bytes, allowed_s: float) -> str | None:
    """Run a command with the notice as its input; returns why it failed."""
    assert receiver.command is not None
    with tempfile.TemporaryFile() as notice, tempfile.TemporaryFile() as errors:  # pipes would wait for its children
        notice.write(data)
        notice.seek(0)
        process = subprocess.Popen(
            receiver.command, stdin=notice, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(allowed_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {allowed_s:g} s"
        if code == 0:
            return None
        errors.seek(0)
        last = (errors.read()[-4096:].decode(errors="replace").strip().splitlines() or [""])[-1][:SHOWN_CHARS]
        return f"exit code {code}" + (f": {last}" if last else "")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it might hand what is sent, and its headers, to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(receiver: NotifySettings, data: bytes, allowed_s: float) -> str | None:
    """Post a notice; returns why the last try failed."""
    headers = {"Content-Type": "application/json", "User-Agent": "draftmill"}
    headers |= {name: _fill(value) for name, value in receiver.headers.items()}
    request = urllib.request.Request(_fill(receiver.webhook or ""), data=data, headers=headers, method="POST")
    opener = urllib.request.build_opener(NoRedirect)
    until_s = time.monotonic() + allowed_s
    problem: str | None = None
    for number in range(TRIES):
        left_s = until_s - time.monotonic() - (RETRY_S if number else 0.0)
        if number and left_s <= 0:
            break
        if number:
            time.sleep(RETRY_S)
        try:
            with opener.open(request, timeout=left_s):
                return None
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code}"
            if error.code < 500 and error.code != 429:  # another try would change nothing
                return problem
        except (OSError, HTTPException) as error:
            problem = f"it can't be reached: {reason_of(error)}"
    return problem


def reason_of(error: BaseException) -> str:
    """Why a receiver was not notified, without the texts of errors that quote parts of a URL, which may be secret."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(error).__name__


class StallWatcher(Watcher):
    """Sends a notice when the run has made no progress for a receiver's `stall_s`; once, until it makes progress again."""

    name = "stall notices"

    def __init__(
        self,
        receivers: Sequence[NotifySettings],
        notice: Callable[[Totals, float], Notice],
        tell: Tell,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receivers = [receiver for receiver in receivers if "stall" in receiver.on]
        self._notice, self._tell, self._clock = notice, tell, clock
        self._looked_s = clock()
        self._still_s = 0.0
        self._before: tuple[int, ...] = ()
        self._notified: set[int] = set()

    def look(self, totals: Totals, scheduler: Scheduler) -> None:
        now_s = self._clock()
        self._still_s += min(MOST_GAP_S, max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        moved = (totals.tokens, totals.rows_done, totals.units_done)
        if moved != self._before:
            self._before, self._still_s = moved, 0.0
            self._notified.clear()
        for number, receiver in enumerate(self._receivers):
            if self._still_s >= receiver.stall_s and number not in self._notified:
                self._notified.add(number)
                self._send(receiver, self._notice(totals, self._still_s))

    def _send(self, receiver: NotifySettings, notice: Notice) -> None:
        sending = threading.Thread(
            target=send, args=([receiver], "stall", notice, self._tell), name="notify", daemon=True
        )
        sending.start()
