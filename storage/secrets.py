"""Removes secrets from a text before it reaches a log, a result file or a screen.

This is the last line of defence: our own messages contain no secrets, but those of other libraries, templates and servers may.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from draftmill.storage.errors import printable

HIDDEN = "[hidden]"
MIN_CHARS = 8
"""Shorter values are not treated as secrets: they would match ordinary words."""

_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY|PRIVATE_KEY", re.IGNORECASE)
_USER_INFO = re.compile(r"(\w+://)[^/\s@'\"]+@")
_SIGNED = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|token|api[_-]?key|password)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """The text without values of secret environment variables, passwords in URLs, and URL signatures."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    return _SIGNED.sub(rf"\1{HIDDEN}", text)


def presentable(text: str) -> str:
    """The text in a form safe to show or store: without secrets and terminal sequences."""
    return printable(redacted(text))


def _secrets() -> list[str]:
    """Secret values of the environment, longest first, since one may be part of another."""
    values = {os.environ.get(name, "") for name in os.environ if _is_secret(name)}
    return sorted((value for value in values if len(value) >= MIN_CHARS), key=len, reverse=True)


@lru_cache(maxsize=4096)  # called for every log line with the same names
def _is_secret(name: str) -> bool:
    return _NAMES.search(name) is not None
