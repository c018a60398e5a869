"""A cluster that takes jobs: its address, the token that it wants, Ray's job API, and the names of our jobs there.

The address is checked before anything is built or sent: each fault is one line, within seconds. Answers take bounded time.

The variables of the token are Ray's: RAY_AUTH_MODE (token or disabled), RAY_AUTH_TOKEN, and RAY_AUTH_TOKEN_PATH, a file that
holds the token. What is shown is always decided here: Ray's own default depends on files that an earlier Ray left behind.

A run directory has one job at a time, and every submission a name of its own: the job's name, a hash of the run directory, and a
number that grows. Two submissions of the same run at the same moment choose the same name, which Ray refuses to the second: so
one job runs, and both can follow it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from draftmill.actors.ray.ray_inside import DO_REQUEST, authentication_error, inside
from draftmill.jobs.config.paths import absolute
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.ray_session import check_reachable
from draftmill.storage.errors import StoreError, UserError

FIELD = "--address"
PORT = 8265
USUAL_PORT = f"its port is usually {PORT}, not that of --ray-address"
ANSWER_S = 15.0
OLDEST_RAY = (2, 40)
"""The oldest Ray that this project runs on (pyproject.toml)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster whose dashboard answers at `url`, and its Ray version."""

    url: str
    ray: str


def dashboard_url(address: str) -> str:
    """`http://host:port` for an address as users write it; UserError if it can't be a dashboard's."""
    allowed = f"allowed: http://HOST:{PORT}, the address of the cluster's dashboard"
    if address == "auto" or address.startswith("ray://"):
        raise UserError(f"{address!r} is not allowed; {allowed}", field=FIELD)
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(f"{address!r} is not an address; {allowed}", field=FIELD) from None
    if parts.username is not None or parts.password is not None:
        raise UserError(f"no credentials in the address; set {TOKEN_PATH} instead", field=FIELD)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise UserError(f"{address!r} is not an address; {allowed}", field=FIELD)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else PORT)}{parts.path.rstrip('/')}"


def reach(address: str, headers: dict[str, str]) -> Cluster:
    """The cluster at an address. UserError in one line if none answers there, it refuses the token, or its Ray is too old."""
    url = dashboard_url(address)
    parts = urlsplit(url)
    check_reachable(f"{parts.hostname}:{parts.port}", field=FIELD)
    answer = _fetch(f"{url}/api/version", url, headers)
    version = answer.get("ray_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise UserError(f"{url} answers, but it is not a Ray dashboard; {USUAL_PORT}", field=FIELD)
    if (match := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, match.groups())) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise UserError(f"the cluster at {url} runs Ray {version}; {oldest} or newer is needed", field=FIELD)
    return Cluster(url, version)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it might hand the headers to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _fetch(query: str, url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(query, headers=headers)
    opener = urllib.request.build_opener(NoRedirect)
    try:
        with opener.open(request, timeout=ANSWER_S) as response:
            return json.loads(response.read(2**20))
    except urllib.error.HTTPError as error:
        raise UserError(_refusal(error.code, url, has_token=bool(headers)), field=FIELD) from None
    except TimeoutError:
        raise UserError(f"{url} accepts connections but did not answer within {ANSWER_S:.0f} s", field=FIELD) from None
    except (OSError, http.client.HTTPException) as error:
        is_http = not isinstance(error, http.client.HTTPException)
        reason = getattr(error, "reason", error) if is_http else "no HTTP"
        raise UserError(f"{url} did not answer as a Ray dashboard does ({reason}); {USUAL_PORT}", field=FIELD) from None
    except ValueError:
        raise UserError(f"{url} answers, but it is not a Ray dashboard; {USUAL_PORT}", field=FIELD) from None


def _refusal(code: int, url: str, *, has_token: bool) -> str:
    if code in {401, 403} and has_token:
        return f"the cluster at {url} refuses the token of {TOKEN} or {TOKEN_PATH}"
    if code in {401, 403}:
        return f"the cluster at {url} asks for a token: set {MODE}=token, and {TOKEN_PATH} or {TOKEN}"
    return f"{url} answers with HTTP {code}, so it is not a Ray dashboard; {USUAL_PORT}"


REQUEST_S = 60.0
"""Seconds that one request may take; the upload of a package is the longest."""

_OVERRIDING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray's client prefers to the address that it is given."""


class Unreachable(StoreError):
    """The cluster does not answer any more."""


class JobExists(StoreError):
    """A job of this name is there already."""


class NotReady(StoreError):
    """The cluster has just started and can't take jobs yet."""


class NoSuchJob(StoreError):
    """The cluster knows no job of this name."""


class RayJobs:
    """The job API of the cluster at an address; UserError if it can't be used."""

    def __init__(self, address: str) -> None:
        headers = token_headers()
        self.cluster = reach(address, headers)
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise UserError(f"needs Ray's job client: pip install 'ray[default]' ({error})", field=FIELD) from None

        class Client(JobSubmissionClient):
            def _do_request(self, method: str, endpoint: str, **rest: Any) -> Any:
                rest.setdefault("timeout", REQUEST_S)  # Ray's own client waits for ever
                return super()._do_request(method, endpoint, **rest)

        inside(DO_REQUEST)
        for name in ("modules.dashboard_sdk", "modules.job.sdk"):  # these speak of uploads and addresses
            logging.getLogger(f"ray.dashboard.{name}").setLevel(logging.WARNING)
        with _without(_OVERRIDING), self._in_words():
            self._client = Client(self.cluster.url, headers=headers)

    def submit(self, name: str, entrypoint: str, environment: Mapping[str, Any], **rest: Any) -> None:
        """Start a job; Exists if the name is taken, NotReady if the cluster can't take jobs yet."""
        with self._in_words():
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=name, runtime_env=deepcopy(dict(environment)), **rest
            )

    def jobs(self) -> list[Any]:
        """All jobs of the cluster (ray.job_submission.JobDetails)."""
        with self._in_words():
            return list(self._client.list_jobs())

    def info(self, name: str) -> Any:
        """One job."""
        with self._in_words():
            return self._client.get_job_info(name)

    def logs(self, name: str) -> str:
        """All that a job has written so far."""
        with self._in_words():
            return str(self._client.get_job_logs(name))

    def stop(self, name: str) -> bool:
        """Ask a job to end; False if it had ended."""
        with self._in_words():
            return bool(self._client.stop_job(name))

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn errors of the client into ours, of one line."""
        from requests.exceptions import RequestException

        try:
            yield
        except (RequestException, ConnectionError) as error:
            raise Unreachable(f"the cluster at {self.cluster.url} does not answer: {_last_line(error)}") from None
        except authentication_error():
            raise UserError(f"the cluster at {self.cluster.url} refuses the token", field=FIELD) from None
        except RuntimeError as error:
            if "already exists" in str(error):
                raise JobExists(_last_line(error)) from None
            if "No available agent" in str(error):
                raise NotReady(
                    f"the head of the cluster at {self.cluster.url} takes no jobs: its dashboard agent does not run (see "
                    "dashboard_agent.log there; its port, 52365 by default, may be taken)"
                ) from None
            if "does not exist" in str(error):
                raise NoSuchJob(_last_line(error)) from None
            raise StoreError(f"the cluster at {self.cluster.url} refused: {_last_line(error)}") from None
        except (TypeError, ValueError) as error:
            raise UserError(_last_line(error)) from None


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def _last_line(error: BaseException) -> str:
    """Ray puts tracebacks of the server before it."""
    lines = [line.strip(" .\"'}") for line in str(error).replace("\\n", "\n").splitlines()]
    return next((line for line in reversed(lines) if any(map(str.isalpha, line))), type(error).__name__)


MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

OWN_FILE = Path("~/.ray/auth_token")
"""Where Ray keeps a token of its own; read only under RAY_AUTH_MODE=token."""


def token_headers() -> dict[str, str]:
    """The headers for requests to a cluster, and Ray's own mode set to match; UserError if there should be a token and is none.

    Without RAY_AUTH_MODE, a token is shown if one of the other two variables is set.
    """
    mode = os.environ.get(MODE) or ("token" if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH) else "disabled")
    if mode not in {"token", "disabled"}:
        raise UserError(f"{mode!r} is not allowed; allowed: token, disabled", field=MODE)
    os.environ[MODE] = mode
    return {"Authorization": f"Bearer {_token()}"} if mode == "token" else {}


def _token() -> str:
    if token := os.environ.get(TOKEN, "").strip():
        return token
    name = os.environ.get(TOKEN_PATH)
    path = Path(name or OWN_FILE).expanduser()
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        if name is None:
            raise UserError(f"{MODE} is token, but there is none; set {TOKEN} or {TOKEN_PATH}", field=MODE) from None
        raise UserError(f"{path}: {reason}", field=TOKEN_PATH) from None
    if not token or not token.isprintable() or not token.isascii():
        raise UserError(f"{path} holds no token", field=TOKEN_PATH)
    return token


RUN = "draftmill.run"
SPEC = "draftmill.spec"
"""Keys of a job's metadata: its run directory, and a hash of what was asked."""


def run_of(spec: JobSpec) -> str:
    """The run directory, as the cluster will know it."""
    return absolute(spec.output.path.rstrip("/"))


def stem_of(name: str, run: str, endpoint: str | None = None) -> str:
    """What the names of all submissions of a run begin with."""
    digest = hashlib.blake2b(f"{endpoint or ''}\n{run}".encode(), digest_size=6).hexdigest()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ["draftmill", slug, digest]))


def digest_of(*parts: str) -> str:
    """A short hash of what was asked, to tell a repeated submission from a changed one."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def submissions(stem: str, jobs: Sequence[Any]) -> list[tuple[int, Any]]:
    """The submissions of a run, oldest first, with their numbers. Goes by the hash: a job may have been renamed."""
    digest = stem.rpartition("-")[2]
    pattern = re.compile(rf"draftmill-(?:[a-z0-9-]+-)?{digest}-(\d+)")
    matches = [(pattern.fullmatch(job.submission_id or ""), job) for job in jobs]
    return sorted(((int(match[1]), job) for match, job in matches if match), key=lambda pair: pair[0])


def next_name(stem: str, jobs: Sequence[Any]) -> str:
    """The name of the next submission of a run."""
    known = submissions(stem, jobs)
    return f"{stem}-{known[-1][0] + 1 if known else 1}"


def is_over(job: Any) -> bool:
    """Whether a job has ended, in any way."""
    return str(job.status) in {"STOPPED", "SUCCEEDED", "FAILED"}
