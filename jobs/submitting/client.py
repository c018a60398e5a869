"""Ray's job API, with answers in bounded time and errors in one line. Everything here may be called again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from draftmill.actors.ray.ray_inside import DO_REQUEST, authentication_error, inside
from draftmill.jobs.submitting.address import FIELD, Cluster
from draftmill.storage.errors import StoreError, UserError

ANSWER_S = 60.0
"""Seconds that one request may take; the upload of a package is the longest."""

_OVERRIDING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray's client prefers to the address that it is given."""


class Unreachable(StoreError):
    """The cluster does not answer any more."""


class Exists(StoreError):
    """A job of this name is there already."""


class NotReady(StoreError):
    """The cluster has just started and can't take jobs yet."""


class NoSuchJob(StoreError):
    """The cluster knows no job of this name."""


class JobClient(Protocol):
    """What is used of the job API."""

    def submit(self, name: str, entrypoint: str, environment: Mapping[str, Any], **rest: Any) -> None:
        """Start a job; Exists if the name is taken, NotReady if the cluster can't take jobs yet."""
        ...

    def jobs(self) -> list[Any]:
        """All jobs of the cluster (ray.job_submission.JobDetails)."""
        ...

    def info(self, name: str) -> Any:
        """One job."""
        ...

    def logs(self, name: str) -> str:
        """All that a job has written so far."""
        ...

    def tail(self, name: str) -> Any:
        """An asynchronous iterator over what a job writes, from the beginning."""
        ...

    def stop(self, name: str) -> bool:
        """Ask a job to end; False if it had ended."""
        ...


class RayJobs:
    """JobClient of a cluster."""

    def __init__(self, cluster: Cluster, headers: Mapping[str, str]) -> None:
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise UserError(f"needs Ray's job client: pip install 'ray[default]' ({error})", field=FIELD) from None

        class Client(JobSubmissionClient):
            def _do_request(self, method: str, endpoint: str, **rest: Any) -> Any:
                rest.setdefault("timeout", ANSWER_S)  # Ray's own client waits for ever
                return super()._do_request(method, endpoint, **rest)

        inside(DO_REQUEST)
        for name in ("modules.dashboard_sdk", "modules.job.sdk"):  # these speak of uploads and addresses
            logging.getLogger(f"ray.dashboard.{name}").setLevel(logging.WARNING)
        self._url = cluster.url
        with _without(_OVERRIDING), self._in_words():
            self._client = Client(cluster.url, headers=dict(headers))

    def submit(self, name: str, entrypoint: str, environment: Mapping[str, Any], **rest: Any) -> None:
        """See JobClient."""
        with self._in_words():
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=dict(environment), **rest)

    def jobs(self) -> list[Any]:
        """See JobClient."""
        with self._in_words():
            return list(self._client.list_jobs())

    def info(self, name: str) -> Any:
        """See JobClient."""
        with self._in_words():
            return self._client.get_job_info(name)

    def logs(self, name: str) -> str:
        """See JobClient."""
        with self._in_words():
            return str(self._client.get_job_logs(name))

    def tail(self, name: str) -> Any:
        """See JobClient."""
        return self._client.tail_job_logs(name)

    def stop(self, name: str) -> bool:
        """See JobClient."""
        with self._in_words():
            return bool(self._client.stop_job(name))

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn errors of the client into ours, of one line."""
        from requests.exceptions import RequestException

        try:
            yield
        except (RequestException, ConnectionError) as error:
            raise Unreachable(f"the cluster at {self._url} does not answer: {_last_line(error)}") from None
        except authentication_error():
            raise UserError(f"the cluster at {self._url} refuses the token", field=FIELD) from None
        except RuntimeError as error:
            if "already exists" in str(error):
                raise Exists(_last_line(error)) from None
            if "No available agent" in str(error):
                raise NotReady(
                    f"the head of the cluster at {self._url} takes no jobs: its dashboard agent does not run (see "
                    "dashboard_agent.log there; its port, 52365 by default, may be taken)"
                ) from None
            if "does not exist" in str(error):
                raise NoSuchJob(_last_line(error)) from None
            raise StoreError(f"the cluster at {self._url} refused: {_last_line(error)}") from None
        except ValueError as error:
            raise UserError(_last_line(error)) from None


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _last_line(error: BaseException) -> str:
    """The last line with words: Ray puts tracebacks of the server before it."""
    lines = [line.strip(" .\"'}") for line in str(error).replace("\\n", "\n").splitlines()]
    return next((line for line in reversed(lines) if any(map(str.isalpha, line))), type(error).__name__)
