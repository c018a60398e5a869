"""The exit codes of every command, on which scripts and cluster schedulers rely (README), and the error budget of code 3.

The budget is `errors.max_rate` and `errors.max_count`. A rate is not meaningful for a small job: one row that is too long is
1.7 % of sixty, but no sign of a wrong job. So a few failures are always allowed: five of them, or 5 % of the samples if that is
less. The bound has no steps: five in a hundred samples, five in five hundred, and from there on `max_rate` (1 %). A rate of 0
and a `max_count` apply exactly; a `max_count` alone replaces the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from draftmill.jobs.formatting import counted
from draftmill.storage.errors import UNUSABLE_ERRORS, AnotherDriver, Error, StoreFull

if TYPE_CHECKING:
    from draftmill.jobs.config.sections import ErrorSettings

OK = 0
UNEXPECTED = 1
UNUSABLE = 2
TOO_MANY_FAILED = 3
INTERRUPTED = 4


class Ended(Error):
    """A run that ended with another exit code than 0, `code`, and no error: interrupted, or too many of its samples failed."""

    def __init__(self, message: str, code: int, *, by_signal: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.by_signal = by_signal


def code_of(error: Exception) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, Ended):
        return error.code
    if isinstance(error, UNUSABLE_ERRORS):
        return UNUSABLE
    return INTERRUPTED if isinstance(error, StoreFull | AnotherDriver) else UNEXPECTED


SEVEREST = (INTERRUPTED, UNEXPECTED, UNUSABLE, TOO_MANY_FAILED, OK)
"""Every code, the severest first. Codes that another start may turn into 0 come first, so that a scheduler starts again."""

FINAL = (UNUSABLE, TOO_MANY_FAILED)
"""Codes after which a scheduler must not start again: it would end in the same way until a user changes something."""


def severest(codes: Iterable[int]) -> int:
    """The exit code of a command that did several things, each with a code of its own; OK if it did none."""
    return min(codes, key=SEVEREST.index, default=OK)


_FEW: Final = 5
_FEW_SHARE: Final = 0.05

_HOPELESS = 1000
"""A job with fewer failed samples is never stopped early: a small job soon finishes, and then shows all of its failures."""


def hopeless(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether a job that is still decoding can only end with exit code 3, and has enough failures to be stopped early."""
    return failed >= _HOPELESS and too_many_failed(failed, rows, allowed)


def too_many_failed(failed: int, rows: int, allowed: ErrorSettings) -> bool:
    """Whether `failed` samples out of `rows` planned ones make the job's exit code 3."""
    return failed > most_failed(rows, allowed)


def most_failed(rows: int, allowed: ErrorSettings) -> int:
    """The most failed samples with which a job of `rows` samples ends with exit code 0."""
    few = min(_FEW, _FEW_SHARE * rows) if allowed.rate else 0
    by_rate = math.floor(max(allowed.rate * rows, few) + 1e-9)  # 0.07 * 100 is a little over 7
    return by_rate if allowed.max_count is None else min(by_rate, allowed.max_count)


def failed_text(failed: int, rows: int, allowed: ErrorSettings) -> str:
    """How many samples failed, and how many may, with the key that says so."""
    most = most_failed(rows, allowed)
    key = f"max_count: {most}" if most == allowed.max_count else f"max_rate: {allowed.rate:g}"
    few = "" if most <= allowed.rate * rows + 1e-9 else " (few rows: 5 %, at most 5)"
    return f"{failed:,} of {counted(rows, 'sample')} failed; errors.{key} allows {most:,}{few}"
