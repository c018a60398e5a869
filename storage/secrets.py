"""Takes secrets out of a text before it reaches a log, a result file or a screen. The last line of defence, not the first:

nothing of ours puts a secret into a message, but the words of other libraries, of templates and of servers pass through.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from storage.errors import printable

HIDDEN = "[hidden]"
MIN_CHARS = 8
"""A shorter value is no secret worth the name, and would be found in many an innocent word."""

_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|API_KEY|PRIVATE_KEY", re.IGNORECASE)
_USER_INFO = re.compile(r"(\w+://)[^/\s@'\"]+@")
_SIGNED = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|token|api[_-]?key|password)=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """The text without what the environment keeps under a secret's name, passwords in URLs, and signatures behind them."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    return _SIGNED.sub(rf"\1{HIDDEN}", text)


def presentable(text: str) -> str:
    """The text as it may be shown or kept: without secrets, and without what a terminal might obey."""
    return printable(redacted(text))


def _secrets() -> list[str]:
    """Values of the environment, longest first: one may be a part of another."""
    values = {os.environ.get(name, "") for name in os.environ if _is_secret(name)}
    return sorted((value for value in values if len(value) >= MIN_CHARS), key=len, reverse=True)


@lru_cache(maxsize=4096)  # every line of a log asks, about the same names
def _is_secret(name: str) -> bool:
    return _NAMES.search(name) is not None
