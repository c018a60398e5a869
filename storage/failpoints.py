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
from dataclasses import dataclass
from functools import lru_cache

VARIABLE = "DRAFTMILL_FAILPOINTS"
ACTIONS = ("kill", "abort", "raise", "sleep")

_hits: Counter[str] = Counter()


class FailpointError(RuntimeError):
    """Raised by a failpoint whose action is `raise`."""


@dataclass(frozen=True, slots=True)
class _Point:
    action: str
    hit: int = 1
    seconds: float = 0.0


def failpoint(name: str) -> None:
    """Run the action if the environment names this point and this hit; else return at once."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    point = _parse(text).get(name)
    if point is None:
        return
    _hits[name] += 1
    if _hits[name] == point.hit:
        _act(name, point)


def reset_failpoints() -> None:
    """Forget the hits counted so far, so that a test starts from one."""
    _hits.clear()


def _act(name: str, point: _Point) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "abort":
        os.abort()
    elif point.action == "raise":
        raise FailpointError(f"failpoint {name}")
    else:
        time.sleep(point.seconds)


@lru_cache(maxsize=8)
def _parse(text: str) -> dict[str, _Point]:
    return dict(_parse_one(item.strip()) for item in text.split(",") if item.strip())


def _parse_one(item: str) -> tuple[str, _Point]:
    name, _, point = item.partition("=")
    action, *numbers = point.split(":")
    if action not in ACTIONS or len(numbers) > 2:
        allowed = ", ".join(ACTIONS)
        raise ValueError(f"{VARIABLE}: {item!r} is not name=action[:hit[:seconds]], action one of {allowed}")
    hit = int(numbers[0]) if numbers else 1
    return name.strip(), _Point(action, hit, float(numbers[1]) if len(numbers) > 1 else 0.0)
