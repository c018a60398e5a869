"""How long a worker decodes before it reports: longer, the more workers there are, so that one driver can listen to all."""

from __future__ import annotations

from typing import Final

LEAST_S: Final = 0.2
MOST_S: Final = 5.0
REPORTS_PER_S: Final = 500
"""Reports that a driver takes from all workers together, at most: each costs it some 50 us, and Ray several times as much."""


def turn_s(workers: int) -> float:
    """Seconds of a turn, for so many workers. A finished unit ends a turn at once."""
    return min(MOST_S, max(LEAST_S, workers / REPORTS_PER_S))
