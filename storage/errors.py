"""The errors shared by all packages: for users, for rows, for stores and for damaged runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

MOST_CHARS = 80
MOST_NAMES = 12


class Error(Exception):
    """Whatever a user can act on; its text is the line that a command prints. `draftmill.Error`."""


class UserError(Error, ValueError):
    """The spec, the input or the run directory is unusable; the message is for the user, the exit code is 2.

    Says the value, what is allowed and where: `field` is the path in the spec (`input.path`) and leads the text.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(UserError, field=self.field), (self.message,)


class RowError(Exception):
    """One row that fails: it becomes a `failed` result row and never ends a job.

    `kind` is a stable class (`bad_json`), `stage` where it happened (read, tokenize, plan, decode, detokenize).
    """

    def __init__(self, kind: str, stage: str, message: str) -> None:
        super().__init__(kind, stage, message)
        self.kind = kind
        self.stage = stage
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind} ({self.stage}): {self.message}"


class StoreError(Error):
    """A store operation failed after its retries: the store is unreachable or full, or refused it."""


class StoreRefused(StoreError):
    """The store answers, but refuses: credentials, permissions, a read-only disk, no such bucket.

    Mostly the user must act, but a refusal may also pass, as that of a token that is being renewed. So a command ends with 2
    only where it has written nothing yet (jobs/drive/leases.py); later a refusal is like any other StoreError.
    """


class StoreFull(StoreError):
    """The disk, or the user's share of it, is full. Nothing is lost: with more room the same command resumes (exit code 4)."""


class AnotherDriver(StoreError):
    """Another driver has the lease that this one needs. Nothing is lost: the same command can resume later (exit code 4)."""


class ChangedInput(StoreError):
    """An input is not what it was when it was listed or planned: its rows may be others."""


class DamagedRun(StoreError):
    """A file of a run directory is damaged: the exit code is 2. The message gives the file, the reason and a remedy."""

    def __init__(self, place: str, reason: object, remedy: str) -> None:
        super().__init__(place, " ".join(str(reason).split()).rstrip("."), remedy)

    def __str__(self) -> str:
        return "{} is damaged: {}; {}".format(*self.args)


UNUSABLE_ERRORS = (UserError, DamagedRun, StoreRefused)
"""The errors after which a command ends with exit code 2: to run it again changes nothing."""


def brief(text: str) -> str:
    """A value from an input, quoted and cut to a length that fits a message."""
    return repr(text) if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]!r}... ({len(text):,} characters)"


def list_names(names: Iterable[str]) -> str:
    """The first few of many names from an input, quoted, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - MOST_NAMES:,} more" if len(known) > MOST_NAMES else ""
    return ", ".join(map(brief, known[:MOST_NAMES])) + more if known else "nothing"


def printable(text: str) -> str:
    """The text with control characters and terminal sequences escaped; tabs and line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\t\n" else char.encode("unicode_escape").decode() for char in text
    )
