"""The address of a cluster's dashboard, checked before anything is built or sent: each fault is one line, within seconds."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from draftmill.jobs.driving.ray_session import check_reachable
from draftmill.jobs.submitting.tokens import MODE, TOKEN, TOKEN_PATH
from draftmill.storage.errors import UserError

FIELD = "--address"
PORT = 8265
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


def reached(address: str, headers: dict[str, str]) -> Cluster:
    """The cluster at an address. UserError in one line if none answers there, it refuses the token, or its Ray is too old."""
    url = dashboard_url(address)
    parts = urlsplit(url)
    check_reachable(f"{parts.hostname}:{parts.port}", field=FIELD)
    answer = _asked(f"{url}/api/version", url, headers)
    version = answer.get("ray_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise UserError(f"{url} answers, but it is not a Ray dashboard; {_usual()}", field=FIELD)
    if (found := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, found.groups())) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise UserError(f"the cluster at {url} runs Ray {version}; {oldest} or newer is needed", field=FIELD)
    return Cluster(url, version)


def _asked(query: str, url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(query, headers=headers)
    opener = urllib.request.build_opener(_NoRedirect)  # a redirect would take the token to another host
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
        raise UserError(f"{url} did not answer as a Ray dashboard does ({reason}); {_usual()}", field=FIELD) from None
    except ValueError:
        raise UserError(f"{url} answers, but it is not a Ray dashboard; {_usual()}", field=FIELD) from None


def _usual() -> str:
    return f"its port is usually {PORT}, not that of --ray-address"


def _refusal(code: int, url: str, *, has_token: bool) -> str:
    if code in {401, 403} and has_token:
        return f"the cluster at {url} refuses the token of {TOKEN} or {TOKEN_PATH}"
    if code in {401, 403}:
        return f"the cluster at {url} asks for a token: set {MODE}=token, and {TOKEN_PATH} or {TOKEN}"
    return f"{url} answers with HTTP {code}, so it is not a Ray dashboard; {_usual()}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None
