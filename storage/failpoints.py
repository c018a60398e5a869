"""Named places where a test may kill, stop or break the process; off unless DRAFTMILL_FAILPOINTS names them.

    DRAFTMILL_FAILPOINTS="commit.before_data=kill:3,lease.before_renew=sleep:1:0.5"

is `name=action[:hit[:seconds]]`, comma separated. `hit` counts the calls of that name in this process, from 1
(default 1). Actions: `kill` (SIGKILL, nothing runs after it), `abort` (SIGABRT, as a crash in native code),
`raise` (FailpointError), `sleep` (for `seconds`).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from functools import lru_cache

VARIABLE = "DRAFTMILL_FAILPOINTS"
ACTIONS = ("kill", "abort", "raise", "sleep")

_hits: Counter[str] = Counter()


class FailpointError(RuntimeError):
    """Raised by a failpoint whose action is `raise`."""


def failpoint(name: str) -> None:
    """Run the action if the environment names this point and this hit; else return at once."""
    text = os.environ.get(VARIABLE)
    if not text or name not in _parse(text):
        return
    action, hit, seconds = _parse(text)[name]
    _hits[name] += 1
    if _hits[name] != hit:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "abort":
        os.abort()
    elif action == "raise":
        raise FailpointError(f"failpoint {name}")
    time.sleep(seconds)


def reset_failpoints() -> None:
    """Forget the hits counted so far, so that a test starts from one."""
    _hits.clear()


@lru_cache(maxsize=8)
def _parse(text: str) -> dict[str, tuple[str, int, float]]:
    points = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, _, point = item.partition("=")
        action, *numbers = point.split(":")
        if action not in ACTIONS or len(numbers) > 2:
            allowed = ", ".join(ACTIONS)
            raise ValueError(f"{VARIABLE}: {item!r} is not name=action[:hit[:seconds]], action one of {allowed}")
        hit, seconds = [*numbers, *("1", "0")[len(numbers) :]]
        points[name.strip()] = action, int(hit), float(seconds)
    return points
