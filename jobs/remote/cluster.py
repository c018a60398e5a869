"""A cluster that takes jobs: its address, the token that it wants, Ray's job API, and the names of our jobs there.

The address is checked before anything is built or sent: each fault is one line, within seconds. Answers take bounded time.

The variables of the token are Ray's: RAY_AUTH_MODE (token or disabled), RAY_AUTH_TOKEN, and RAY_AUTH_TOKEN_PATH, a file that
holds the token. What is shown is always decided here: Ray's own default depends on files that an earlier Ray left behind.

A run directory has one job at a time, and every submission a name of its own: the job's name, a hash of the run directory, and a
number that grows. Two submissions of the same run at the same moment choose the same name, which Ray refuses to the second: so
one job runs, and both can follow it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from draftmill.actors.ray.ray_inside import DO_REQUEST, authentication_error, inside
from draftmill.jobs.drive.ray_session import check_reachable
from draftmill.jobs.plan.fingerprint import digest
from draftmill.storage.errors import StoreError, UserError

FIELD = "--address"
PORT = 8265
USUAL_PORT = f"its port is usually {PORT}, not that of --ray-address"
ANSWER_S = 15.0
OLDEST_RAY = (2, 40)
"""The oldest Ray that this project runs on (pyproject.toml)."""

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"


def dashboard_url(address: str) -> str:
    """`http://host:port` for an address as users write it; UserError if it can't be a dashboard's."""
    if "@" in address:
        raise UserError(f"no credentials in the address; set {TOKEN_PATH} instead", field=FIELD)
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port, is_url = parts.port, parts.scheme in {"http", "https"} and address != "auto"
    except ValueError:
        parts, port, is_url = urlsplit(""), None, False
    if not is_url or not parts.hostname or parts.query or parts.fragment:
        allowed = f"http://HOST:{PORT}, the address of the cluster's dashboard"
        raise UserError(f"{address!r} is not allowed; allowed: {allowed}", field=FIELD)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else PORT)}{parts.path.rstrip('/')}"


def reach(url: str, headers: Mapping[str, str]) -> str:
    """The Ray version of a dashboard. UserError if none answers there, it refuses the token, or its Ray is too old."""
    parts = urlsplit(url)
    check_reachable(f"{parts.hostname}:{parts.port}", field=FIELD)
    try:
        # A redirect might hand the headers to another host.
        answer = requests.get(f"{url}/api/version", headers=headers, timeout=ANSWER_S, allow_redirects=False)
        refuses = answer.status_code in {401, 403}
        version = "" if refuses else str(answer.json()["ray_version"])
    except (requests.RequestException, TypeError, KeyError) as error:
        reason = _last_line(error)
        raise UserError(f"{url} did not answer as a Ray dashboard does ({reason}); {USUAL_PORT}", field=FIELD) from None
    if refuses:
        hint = f"the one of {TOKEN} or {TOKEN_PATH}" if headers else f"set {MODE}=token, and {TOKEN_PATH} or {TOKEN}"
        raise UserError(f"the cluster at {url} refuses the token, or needs one: {hint}", field=FIELD)
    if (match := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, match.groups())) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise UserError(f"the cluster at {url} runs Ray {version}; {oldest} or newer is needed", field=FIELD)
    return version


REQUEST_S = 60.0
"""Seconds that one request may take; the upload of a package is the longest."""


class Unreachable(StoreError):
    """The cluster does not answer any more."""


class JobExists(StoreError):
    """A job of this name is there already."""


class NotReady(StoreError):
    """The cluster has just started and can't take jobs yet."""


class RayJobs:
    """The job API of the cluster at an address; UserError if it can't be used."""

    def __init__(self, address: str) -> None:
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):
            def _do_request(self, method: str, endpoint: str, **rest: Any) -> Any:
                rest.setdefault("timeout", REQUEST_S)  # Ray's own client waits for ever
                return super()._do_request(method, endpoint, **rest)

        headers, self.url = token_headers(), dashboard_url(address)
        self.ray_version = reach(self.url, headers)
        inside(DO_REQUEST)
        for name in ("modules.dashboard_sdk", "modules.job.sdk"):  # these speak of uploads and addresses
            logging.getLogger(f"ray.dashboard.{name}").setLevel(logging.WARNING)
        os.environ[ADDRESS_VARIABLE] = self.url  # Ray's client prefers it to the address that it is given
        with self._in_words():
            self._client = Client(self.url, headers=headers)

    def submit(self, name: str, entrypoint: str, environment: Mapping[str, Any], metadata: dict[str, str]) -> None:
        """Start a job; JobExists if the name is taken, NotReady if the cluster can't take jobs yet."""
        runtime_env = deepcopy(dict(environment))  # the client writes into it
        with self._in_words():
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=name, runtime_env=runtime_env, metadata=metadata
            )

    def jobs(self) -> list[Any]:
        """All jobs of the cluster (ray.job_submission.JobDetails)."""
        with self._in_words():
            return list(self._client.list_jobs())

    def info(self, name: str) -> Any:
        with self._in_words():
            return self._client.get_job_info(name)

    def logs(self, name: str) -> str:
        """All that a job has written so far."""
        with self._in_words():
            return str(self._client.get_job_logs(name))

    def stop(self, name: str) -> None:
        """Ask a job to end."""
        with self._in_words():
            self._client.stop_job(name)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn errors of the client into ours, of one line."""
        try:
            yield
        except (requests.RequestException, ConnectionError) as error:
            raise Unreachable(f"the cluster at {self.url} does not answer: {_last_line(error)}") from None
        except authentication_error():
            raise UserError(f"the cluster at {self.url} refuses the token", field=FIELD) from None
        except RuntimeError as error:
            if "already exists" in str(error):
                raise JobExists(_last_line(error)) from None
            if "No available agent" in str(error):
                raise NotReady(
                    f"the head of the cluster at {self.url} takes no jobs: its dashboard agent does not run (see "
                    "dashboard_agent.log there; its port, 52365 by default, may be taken)"
                ) from None
            raise StoreError(f"the cluster at {self.url} refused: {_last_line(error)}") from None
        except (TypeError, ValueError) as error:
            raise UserError(_last_line(error)) from None


def _last_line(error: BaseException) -> str:
    """Ray puts tracebacks of the server before it."""
    lines = [line.strip(" .\"'}") for line in str(error).replace("\\n", "\n").splitlines()]
    return next((line for line in reversed(lines) if any(map(str.isalpha, line))), type(error).__name__)


MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def token_headers() -> dict[str, str]:
    """The headers for requests to a cluster, and Ray's own mode set to match; UserError if there should be a token and is none.

    Without RAY_AUTH_MODE, a token is shown if one of the other two variables is set. Ray's own file counts only with mode token.
    """
    token, place = os.environ.get(TOKEN, "").strip(), os.environ.get(TOKEN_PATH)
    mode = os.environ.get(MODE) or ("token" if token or place else "disabled")
    if mode not in {"token", "disabled"}:
        raise UserError(f"{mode!r} is not allowed; allowed: token, disabled", field=MODE)
    os.environ[MODE] = mode
    if mode == "disabled":
        return {}
    path = Path(place or "~/.ray/auth_token").expanduser()
    with suppress(OSError, UnicodeDecodeError):
        token = token or path.read_text().strip()
    if not token or not token.isprintable() or not token.isascii():
        raise UserError(f"{MODE} is token, but {path} holds none; set {TOKEN} or {TOKEN_PATH}", field=TOKEN_PATH)
    return {"Authorization": f"Bearer {token}"}


RUN = "draftmill.run"
SPEC = "draftmill.spec"
"""Keys of a job's metadata: its run directory, and a hash of what was asked."""


def stem_of(name: str, run: str, endpoint: str | None = None) -> str:
    """What the names of all submissions of a run begin with."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ["draftmill", slug, digest([endpoint, run])[:12]]))


def is_over(job: Any) -> bool:
    """Whether a job has ended, in any way."""
    return str(job.status) in {"STOPPED", "SUCCEEDED", "FAILED"}
