"""Recognises secrets: by the names that hold them, in URLs and in texts; all patterns for that are here.

They are removed from a text before it reaches a log, a result file or a screen, as the last line of defence: our own messages
contain no secrets, but those of other libraries, templates and servers may. A spec that holds one is refused.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from draftmill.storage.errors import printable

HIDDEN = "[hidden]"
MIN_CHARS = 8
"""Shorter values are not treated as secrets: they would match ordinary words."""

_VARIABLES = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|(ACCESS|ACCOUNT|API|PRIVATE)_KEY|CONNECTION_STRING", re.IGNORECASE
)
_AUTHORIZATION = re.compile(r"\b(?:bearer|basic)\s+(?!\$)\S{8,}", re.IGNORECASE)
_USER_INFO = re.compile(
    r"(?<=://)[^/\s@'\"]+@"
)  # without the scheme: to look for its beginning takes the square of a word's length
_SIGNED = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|AccountKey|Signature|sig|token|api[_-]?key|password)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """The text without values of secret environment variables, passwords in URLs, and URL signatures."""
    values = {os.environ.get(name, "") for name in os.environ if is_secret_variable(name)}
    for secret in sorted(values, key=len, reverse=True):  # one may be part of another
        text = text.replace(secret, HIDDEN) if len(secret) >= MIN_CHARS else text
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    return _SIGNED.sub(rf"\1{HIDDEN}", text)


def presentable(text: str) -> str:
    """The text in a form safe to show or store: without secrets and terminal sequences."""
    return printable(redacted(text))


@lru_cache(maxsize=4096)  # called for every log line with the same names
def is_secret_variable(name: str) -> bool:
    """Whether the name of an environment variable says that its value is secret."""
    return _VARIABLES.search(name) is not None


def has_authorization(text: str) -> bool:
    """Whether a text holds the credential of a header `Authorization`, spelled out."""
    return _AUTHORIZATION.search(text) is not None
