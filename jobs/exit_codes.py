"""The exit codes of every command. Scripts and cluster schedulers rely on them (README)."""

from __future__ import annotations

from collections.abc import Iterable

from draftmill.storage.errors import UNUSABLE_ERRORS, AnotherDriver, StoreFull

OK = 0
UNEXPECTED = 1
UNUSABLE = 2
TOO_MANY_FAILED = 3
INTERRUPTED = 4


def code_of(error: Exception) -> int:
    """The exit code of a command that ends with this error."""
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
