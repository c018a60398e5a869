"""Hands requests on, as they are, to an S3 server outside of the tests: signatures stay valid, and faults come before it.

    DRAFTMILL_TEST_S3=http://127.0.0.1:5605 pytest -m s3

runs the S3 tests against that server, which must know the key `test` with the secret `test-secret`.
"""

import http.client
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

VARIABLE = "DRAFTMILL_TEST_S3"

_OURS = frozenset({"connection", "transfer-encoding", "expect", "date", "server"})
"""Headers that are a connection's own, or that the server in between writes."""


@dataclass
class Forwarder:
    """A WSGI application that asks the server at `endpoint`."""

    endpoint: str

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        there = urlsplit(self.endpoint)
        assert there.hostname is not None
        connection = http.client.HTTPConnection(there.hostname, there.port, timeout=60)
        try:
            connection.putrequest(
                environ["REQUEST_METHOD"], environ["RAW_URI"], skip_host=True, skip_accept_encoding=True
            )
            for name, value in _headers(environ):
                connection.putheader(name, value)
            connection.endheaders(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OURS]
        start_response(f"{answer.status} {answer.reason}", kept)
        return [body]


def _headers(environ: dict) -> Iterable[tuple[str, str]]:
    for name, value in environ.items():
        plain = name.removeprefix("HTTP_").replace("_", "-").lower()
        is_header = name.startswith("HTTP_") or name in {"CONTENT_TYPE", "CONTENT_LENGTH"}
        if is_header and value and plain not in _OURS:
            yield plain, value
