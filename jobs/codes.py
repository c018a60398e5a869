"""The exit codes of every command. Scripts and cluster schedulers rely on them (README)."""

from __future__ import annotations

from draftmill.storage.errors import UNUSABLE_ERRORS, StoreFull

OK = 0
UNEXPECTED = 1
UNUSABLE = 2
TOO_MANY_FAILED = 3
INTERRUPTED = 4


def code_of(error: Exception) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, UNUSABLE_ERRORS):
        return UNUSABLE
    return INTERRUPTED if isinstance(error, StoreFull) else UNEXPECTED
