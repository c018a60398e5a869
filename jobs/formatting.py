"""Notes to the user during long steps; counts, rates, sizes, times and tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Notes:
    """Receives notes to the user; here they are discarded."""

    def note(self, message: str) -> None:
        """Show the user one message now."""

    def step(self, what: str, done: int, total: int) -> None:
        """Show how many of the bytes of `what` are done; may be called often."""


def counted(count: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def rate_text(rate: float) -> str:
    """A rate, with one decimal below 10."""
    return f"{rate:,.0f}" if rate >= 9.95 or rate == 0 else f"{rate:.1f}"


def size_text(num_bytes: float) -> str:
    """A size in bytes, kB, MB, GB or TB."""
    from rich.filesize import decimal

    return str(decimal(round(num_bytes)))


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table_lines(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows of cells as indented lines with aligned columns; with `right` all but the first are aligned to the right.

    Short rows are filled up with dashes.
    """
    count = max(map(len, rows), default=0)
    full = [[*row, *["-"] * (count - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    sides = ["<", *[">" if right else "<"] * (count - 1)]
    return [
        "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in full
    ]


def device_text(facts: Mapping[str, Any]) -> str:
    """The facts in a line: `NVIDIA H100, bfloat16, torch 2.13.0+cu130, ...; kernels on; graphs off: DRAFTMILL_GRAPHS is 0`."""
    versions = [f"{name} {facts[name]}" for name in ("torch", "capability", "driver", "triton") if facts.get(name)]
    small = [f"weights {facts['weights']}, {size_text(facts['weight_bytes'])}"] if "weights" in facts else []
    parts = [", ".join([str(facts["name"]), str(facts["dtype"]), *small, *versions])]
    parts += [f"layers by {facts['layers_by']}"] if "layers_by" in facts else []
    if "kernels" in facts:
        parts += [_kernels_text(facts["kernels"]), f"graphs {facts['graphs']}"]
    if drafter := facts.get("drafter"):
        own = [f"layers by {drafter['layers_by']}"] if "layers_by" in drafter else []
        own += [_kernels_text(drafter["kernels"])] if "kernels" in drafter and "kernels" in facts else []
        parts += [f"drafter: {', '.join(own)}"] if own else []
    return "; ".join(parts)


def _kernels_text(verdicts: Mapping[str, str]) -> str:
    off = [f"{name} {verdict}" for name, verdict in sorted(verdicts.items()) if verdict != "on"]
    return f"kernels {', '.join(off) or 'on'}"
