"""How many failed samples are too many: `errors.max_rate` and `errors.max_count`."""

from __future__ import annotations

from jobs.spec import ErrorSettings

HOPELESS = 1000
"""Failed samples below which no job is stopped early: a small one is soon finished, and shows all of its failures."""


def hopeless(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether a job that is still decoding can only end with exit code 3, and is large enough to be stopped for it."""
    return failed >= HOPELESS and too_many_failed(failed, rows, allowed)


def too_many_failed(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether so many failed samples, of so many planned ones, make the job's exit code 3."""
    over_count = allowed.max_count is not None and failed > allowed.max_count
    return over_count or failed > allowed.max_rate * rows
