"""How many failed samples are too many: `errors.max_rate` and `errors.max_count`.

A rate says nothing of a small job: one row that is too long is 1.7 % of sixty, and no sign that the job went wrong. So a few
failures are let pass whatever their rate: FEW of them, or FEW_SHARE of the samples where that is less. The bound grows without
a step: five in a hundred samples, five in five hundred, and from there on `max_rate` as it stands (1 %). A rate of 0
and a `max_count` mean what they say.
"""

from __future__ import annotations

import math
from typing import Final

from jobs.spec.job_spec import ErrorSettings

FEW: Final = 5
FEW_SHARE: Final = 0.05

HOPELESS = 1000
"""Failed samples below which no job is stopped early: a small one is soon finished, and shows all of its failures."""


def hopeless(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether a job that is still decoding can only end with exit code 3, and is large enough to be stopped for it."""
    return failed >= HOPELESS and too_many_failed(failed, rows, allowed)


def too_many_failed(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether so many failed samples, of so many planned ones, make the job's exit code 3."""
    return failed > most_failed(rows, allowed)


def most_failed(rows: int, allowed: ErrorSettings) -> int:
    """The most failed samples with which a job of `rows` samples ends with exit code 0."""
    few = min(FEW, FEW_SHARE * rows) if allowed.max_rate else 0
    by_rate = math.floor(max(allowed.max_rate * rows, few) + 1e-9)  # 0.07 * 100 is a little over 7
    return by_rate if allowed.max_count is None else min(by_rate, allowed.max_count)
