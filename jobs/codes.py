"""The exit codes of every command. Scripts and cluster schedulers rely on them (README)."""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
UNUSABLE = 2
TOO_MANY_FAILED = 3
INTERRUPTED = 4
