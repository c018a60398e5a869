"""Finds the second processes of groups among the processes that this one has started."""

from contextlib import suppress

import psutil


def followers() -> list[int]:
    """Process ids of the actors that repeat the calls of another process's model, in this process's own Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may have ended
            if any("Follower" in part for part in process.cmdline()):
                found.append(process.pid)
    return found
