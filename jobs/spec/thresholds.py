"""How many failed samples are too many: `errors.max_rate` and `errors.max_count`.

A rate is not meaningful for a small job: one row that is too long is 1.7 % of sixty, but no sign of a wrong job. So a few
failures are always allowed: FEW of them, or FEW_SHARE of the samples if that is less. The bound has no steps: five in a
hundred samples, five in five hundred, and from there on `max_rate` (1 %). A rate of 0 and a `max_count` apply exactly.
"""

from __future__ import annotations

import math
from typing import Final

from draftmill.jobs.spec.job_spec import ErrorSettings

FEW: Final = 5
FEW_SHARE: Final = 0.05

HOPELESS = 1000
"""A job with fewer failed samples is never stopped early: a small job soon finishes, and then shows all of its failures."""


def hopeless(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether a job that is still decoding can only end with exit code 3, and has enough failures to be stopped early."""
    return failed >= HOPELESS and too_many_failed(failed, rows, allowed)


def too_many_failed(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether `failed` samples out of `rows` planned ones make the job's exit code 3."""
    return failed > most_failed(rows, allowed)


def most_failed(rows: int, allowed: ErrorSettings) -> int:
    """The most failed samples with which a job of `rows` samples ends with exit code 0."""
    few = min(FEW, FEW_SHARE * rows) if allowed.max_rate else 0
    by_rate = math.floor(max(allowed.max_rate * rows, few) + 1e-9)  # 0.07 * 100 is a little over 7
    return by_rate if allowed.max_count is None else min(by_rate, allowed.max_count)
