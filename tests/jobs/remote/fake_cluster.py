"""A fake of Ray's job API for tests: jobs that a test lets write, end and vanish; and an HTTP server with one answer."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from draftmill.jobs.remote.cluster import JobExists, NotReady, RayJobs, Unreachable


@dataclass
class FakeJob:
    """What the cluster knows of a job."""

    submission_id: str
    entrypoint: str = ""
    runtime_env: dict = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    status: str = "RUNNING"
    driver_exit_code: int | None = None
    message: str | None = None
    log: str = ""

    def end(self, status: str, code: int | None = None, message: str | None = None) -> None:
        self.status, self.driver_exit_code, self.message = status, code, message


class FakeCluster(RayJobs):
    """A cluster of a test. `script` is called before every request for a job's state, with the number of such requests so far."""

    def __init__(self, *jobs: FakeJob) -> None:
        self.url, self.ray_version = "http://head:8265", "2.60.0"
        self.known = {job.submission_id: job for job in jobs}
        self.asked = 0
        self.deaf = 0
        self.unready = 0
        self.reads = 0
        self.script = lambda asked: None
        self.late: list[FakeJob] = []
        """Jobs that another submission starts after our look at the list."""

    def submit(self, name: str, entrypoint: str, environment: Mapping, metadata: dict[str, str]) -> None:
        if self.unready:
            self.unready -= 1
            raise NotReady("No available agent")
        for job in self.late:
            self.known[job.submission_id] = job
        self.late = []
        if name in self.known:
            raise JobExists(name)
        self.known[name] = FakeJob(name, entrypoint, dict(environment), metadata)

    def jobs(self) -> list:
        return list(self.known.values())

    def info(self, name: str) -> FakeJob:
        self.asked += 1
        self.script(self.asked)
        if self.deaf:
            self.deaf -= 1
            raise Unreachable("no answer")
        return self.known[name]

    def logs(self, name: str) -> str:
        self.reads += 1
        return self.known[name].log

    def stop(self, name: str) -> None:
        self.known[name].end("STOPPED")


@contextmanager
def answering(status: int, body: str, seen: list[dict[str, str]] | None = None) -> Iterator[str]:
    """A server that answers every request so; yields its address, and appends the headers of requests to `seen`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append(dict(self.headers))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", body)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
