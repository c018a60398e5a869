"""Finds the cluster that runs this process, where Ray's job API runs it.

The job API writes into RAY_ADDRESS the Ray that was started last on the machine. Where two run beside each other that may be the
wrong one: workers would start there, and lack the shipped code. The raylet that started the driver knows its own head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import psutil

_FLAG: Final = "--gcs-address="


def own_address() -> str | None:
    """The head (HOST:PORT) of the raylet among this process's ancestors, None if there is none or it can't be seen."""
    try:
        return address_among([_words(process) for process in psutil.Process().parents()])
    except psutil.Error:
        return None


def address_among(commands: Iterable[Sequence[str]]) -> str | None:
    """The head's address in the first command line that is a raylet's; None if there is none."""
    for words in commands:
        if words and words[0].rpartition("/")[2] == "raylet":
            return next((word.removeprefix(_FLAG) for word in words if word.startswith(_FLAG)), None) or None
    return None


def _words(process: psutil.Process) -> list[str]:
    """A command line. A process that renames itself leaves it as one string."""
    try:
        return [word for argument in process.cmdline() for word in argument.split(" ")]
    except psutil.Error:  # another user's, or gone
        return []
