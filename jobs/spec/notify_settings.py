"""The section `notify` of a spec: who is notified that a run has ended or stalls. It holds no secrets."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from draftmill.actors.task import as_tuple
from draftmill.decoders.common_settings import Settings
from draftmill.storage.secrets import has_authorization, has_secret_paths, is_secret_parameter, redacted

Event = Literal["finish", "failure", "stall", "interrupt"]

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A place in a webhook or a header where the value of an environment variable is put in when a notice is sent."""

HOW = "write ${NAME} in its place, and set the environment variable NAME where the driver runs"


def _one_or_more(value: Any) -> Any:
    """One word, or a list of them, as a tuple."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if redacted(word) != word or has_authorization(word):
            raise ValueError(
                "no credentials in the spec, which is copied into the run directory; the command has the driver's environment"
            )
    return words


def _webhook(url: str) -> str:
    parts = urlsplit(VARIABLE.sub("x", url))
    if VARIABLE.match(url) is None and (parts.scheme not in {"http", "https"} or not parts.hostname):
        raise ValueError(f"{redacted(url)!r} is not allowed; allowed: http:// and https:// URLs, and ${{NAME}}")
    if "@" in parts.netloc:
        raise ValueError(f"no credentials in the spec; {HOW}")
    for name, value in parse_qsl(urlsplit(url).query):
        is_secret = is_secret_parameter(name) or redacted(f"{name}={value}") != f"{name}={value}"
        if is_secret and not VARIABLE.search(value):
            raise ValueError(f"the parameter {name!r} looks like a credential, and a spec may hold none; {HOW}")
    if has_secret_paths(parts.hostname or "") and not VARIABLE.search(urlsplit(url).path):
        raise ValueError(f"the path of a webhook of {parts.hostname} is a credential, and a spec may hold none; {HOW}")
    if not VARIABLE.search(url) and redacted(url) != url:
        raise ValueError(f"no credentials in the spec; {HOW}")
    return url


def _headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not value.isprintable():
            raise ValueError(f"{name!r} is not a header")
        if (is_secret_parameter(name) or has_authorization(value)) and not VARIABLE.search(value):
            raise ValueError(f"the header {name!r} looks like a credential, and a spec may hold none; {HOW}")
    return headers


class NotifySettings(Settings):
    """One receiver of notices: a command or a webhook."""

    command: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1)], ...],
            BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...]),
            Field(min_length=1),
            AfterValidator(_command),
        ]
        | None
    ) = Field(default=None, description="a command and its arguments; it reads the notice from standard input")
    webhook: Annotated[str, AfterValidator(_webhook)] | None = Field(default=None, description="gets notices by POST")
    headers: Annotated[dict[str, str], AfterValidator(_headers)] = Field(
        default_factory=dict, description="of the webhook's request"
    )
    on: Annotated[
        tuple[Event, ...],
        BeforeValidator(_one_or_more, json_schema_input_type=Event | tuple[Event, ...]),
        Field(min_length=1),
    ] = Field(default=("finish", "failure", "stall"), description="the events of which it is notified")
    timeout_s: Annotated[float, Field(gt=0.0, le=300.0)] = Field(default=10.0, description="seconds until it is ended")
    stall_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = Field(default=1800.0, description="seconds")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> NotifySettings:
        if (self.command is None) == (self.webhook is None):
            raise ValueError("needs one of `command` and `webhook`")
        if self.headers and self.webhook is None:
            raise ValueError("headers: only with `webhook`")
        return self


def as_receivers(value: Any) -> Any:
    """One receiver, or a list of them, as a tuple."""
    return (value,) if isinstance(value, dict) else as_tuple(value)


Receivers = Annotated[
    tuple[NotifySettings, ...],
    BeforeValidator(as_receivers, json_schema_input_type=NotifySettings | tuple[NotifySettings, ...]),
]
