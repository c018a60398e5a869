"""How many failed samples are too many: `errors.max_rate` and `errors.max_count`."""

from __future__ import annotations

from jobs.spec import ErrorSettings


def too_many_failed(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether so many failed samples, of so many planned ones, make the job's exit code 3."""
    over_count = allowed.max_count is not None and failed > allowed.max_count
    return over_count or failed > allowed.max_rate * rows
