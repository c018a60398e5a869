"""An S3 server in this process (moto over HTTP on loopback, or another one behind us) whose answers can be made to fail."""

import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from socket import SHUT_RDWR
from threading import Lock, Thread
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.storage.stores.s3_forward import VARIABLE, Forwarder

_ANSWERS = {
    "503": ("503 Slow Down", "SlowDown"),
    "500": ("500 Internal Server Error", "InternalError"),
    "409": ("409 Conflict", "ConditionalRequestConflict"),
    "403": ("403 Forbidden", "AccessDenied"),
    "404": ("404 Not Found", "NoSuchUpload"),
    "412": ("412 Precondition Failed", "PreconditionFailed"),
    "hidden": ("200 OK", "InternalError"),
}
"""Status and code of the answers with which nothing is done."""


@dataclass
class Fault:
    """What goes wrong, `times` times, with every `every`th request of this method whose path, or query, holds `part`.

    With `seconds`, with all of them for so long, from the first one on.

    `kind`: one of _ANSWERS (nothing is done; `hidden` says so under the status 200, as S3 may where an upload is completed);
    reset (nothing is done, no answer); lost (done, but no answer);
    ignore_conditions (done as if no condition had been set); cut (half of the body, then the end).
    """

    kind: str
    method: str = "PUT"
    part: str = ""
    times: int = 1
    every: int = 1
    seconds: float | None = None
    seen: int = 0
    ends_s: float | None = None

    def strikes(self, method: str, path: str) -> bool:
        """Take note of a request; True if this is one that goes wrong."""
        if not self.times or method != self.method or self.part not in path:
            return False
        if self.seconds is not None:
            self.ends_s = self.ends_s or time.monotonic() + self.seconds
            return time.monotonic() < self.ends_s
        self.seen += 1
        if self.seen % self.every:
            return False
        self.times -= 1
        return True


@dataclass
class Storm:
    """Every request goes wrong with a probability, in one of the ways that its method knows; `struck` counts them by kind.

    `stall` keeps an answer back for `stall_s` and then hangs up, with nothing done.
    """

    rate: float
    rng: random.Random
    stall_s: float
    struck: Counter[str] = field(default_factory=Counter)

    def fault(self, method: str) -> str:
        """The kind of this request's fault, empty for none."""
        if self.rng.random() >= self.rate:
            return ""
        writing = ("503", "500", "409", "reset", "lost", "stall")
        kinds = {"PUT": writing, "POST": (*writing, "hidden"), "GET": ("503", "500", "reset", "cut", "stall")}
        kind = self.rng.choice(kinds.get(method, ("503", "500", "reset")))
        self.struck[kind] += 1
        return kind


@dataclass
class FaultyApp:
    """A WSGI application in front of the one that does the work."""

    app: Callable[..., Iterable[bytes]]
    faults: list[Fault] = field(default_factory=list)
    storm: Storm | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)
    one_at_a_time: Any = field(default_factory=Lock)
    hangs: bool = False
    """No answer to any request."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        while self.hangs:
            time.sleep(0.05)
        query = environ.get("QUERY_STRING")
        fault = self._next_fault(environ["REQUEST_METHOD"], environ["PATH_INFO"] + (f"?{query}" if query else ""))
        if fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code></Error>".encode()]
        if fault == "stall" and self.storm is not None:
            time.sleep(self.storm.stall_s)
        if fault in {"reset", "stall"}:
            return _hang_up(environ)
        if fault == "ignore_conditions":
            environ.pop("HTTP_IF_NONE_MATCH", None)
            environ.pop("HTTP_IF_MATCH", None)
        with self.one_at_a_time:  # moto looks and then writes; S3 does both at once
            answer = self.app(environ, start_response)
        if fault == "lost":
            b"".join(answer)
            return _hang_up(environ)
        if fault == "cut":
            body = b"".join(answer)
            return [body[: len(body) // 2]]
        return answer

    def _next_fault(self, method: str, path: str) -> str:
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.strikes(method, path):
                    return fault.kind
            return self.storm.fault(method) if self.storm is not None else ""


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(SHUT_RDWR)
    raise ConnectionResetError


class S3Server:
    """The server, its address and its faults; `stop` ends it."""

    def __init__(self) -> None:
        real = os.environ.get(VARIABLE)
        self.app = FaultyApp(Forwarder(real) if real else DomainDispatcherApplication(create_backend_app))
        self._server = make_server("127.0.0.1", 0, self.app, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def fail(
        self,
        kind: str,
        method: str = "PUT",
        part: str = "",
        times: int = 1,
        every: int = 1,
        seconds: float | None = None,
    ) -> None:
        """Let the next matching requests go wrong, or every `every`th of them, or all for some seconds."""
        if kind == "ignore_conditions" and isinstance(self.app.app, Forwarder):
            pytest.skip("a condition is signed, and can't be taken out on the way")
        self.app.faults.append(Fault(kind, method, part, times, every, seconds))

    def rage(self, rate: float, *, seed: int, stall_s: float) -> Storm:
        """Let any request go wrong with this probability, from now on."""
        self.app.storm = Storm(rate, random.Random(seed), stall_s)
        return self.app.storm

    def new_bucket(self) -> str:
        name = f"bucket-{secrets.token_hex(4)}"
        boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1").create_bucket(Bucket=name)
        return name

    def calm(self) -> None:
        self.app.faults.clear()
        self.app.storm, self.app.hangs = None, False
        self.app.requests.clear()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
