"""Packs row lengths into units, and computes the cost of a packing. Works on numbers only: no rows, no files.

    window of 10 rows      lengths  7 3 9 1 8 2 6 9 4 5
    sorted, longest first           9 9 8 7 6 5 4 3 2 1
    units of at most 4 rows        [9 9 8 7][6 5 4][3 2 1]      even shares; a token budget may cut earlier

Rows of a unit are of similar length, so a batch of them has little padding.

Where a worker computes common beginnings of prompts once (makers.shares_beginnings), rows that begin alike come after one another
(actors/planning/beginnings.py): groups by their longest row, and inside of a group again. A unit then ends where a group ends, if
one does shortly before its limit.

    begin alike                     a a a a b b b c c c     a: the ends of one question
    units of at most 8 rows        [9 6 4 2 8 8 7][5 3 1]   not [.. 5][3 1], though 8 rows would fit
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.actors.planning.beginnings import Grouped, grouped_by_beginning

UNIT_TOKENS = 2**19
"""Maximum tokens of a unit; bounds the memory and time of what is committed, retried and bisected together."""

MIN_UNIT_ROWS, MAX_UNIT_ROWS, UNITS_PER_WINDOW = 32, 1024, 64

WINDOW_TOKENS = UNITS_PER_WINDOW * UNIT_TOKENS
"""Maximum tokens of a window: a unit's rows may be anywhere in it, so a worker may have to read all of it."""

SLACK = 8
"""A unit may be shorter than its share by this part of it, to end with a group."""

Range = tuple[int, int]


def auto_unit_rows(rows_in_first_window: int) -> int:
    """Rows per unit for `unit_rows: auto`: 64 units in the first window, but 32 to 1024 rows."""
    return min(MAX_UNIT_ROWS, max(MIN_UNIT_ROWS, -(-rows_in_first_window // UNITS_PER_WINDOW)))


def window_rows(lengths: NDArray[np.int32], most: int) -> int:
    """How many of these rows make the next window: `most`, or the fewest that reach WINDOW_TOKENS, whichever is smaller."""
    return min(most, 1 + int(np.searchsorted(np.cumsum(lengths.astype(np.int64)), WINDOW_TOKENS)))


def longest_first(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the order of a window's rows: longest first; a stable sort."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def by_beginning(lengths: NDArray[np.int32], beginnings: pa.ChunkedArray, *, max_rows: int) -> Grouped:
    """Return the order of a window's rows, of which those that begin alike come after one another; `longest_first` if none do.

    Rows of all lengths that have little in common stay apart, unless they fill units of `max_rows` rows by themselves.
    """
    rank = np.empty(len(lengths), dtype=np.int64)
    rank[longest_first(lengths)] = np.arange(len(lengths))
    return grouped_by_beginning(beginnings, rank, large=max_rows)


def cut(
    lengths: NDArray[np.int32],
    *,
    max_rows: int,
    max_tokens: int = UNIT_TOKENS,
    depth: NDArray[np.int64] | None = None,
) -> list[Range]:
    """Cut sorted rows into [start, end) units of at most `max_rows` rows and `max_tokens` tokens, in even shares.

    A row that exceeds the token budget forms a unit alone. `depth` is that of `by_beginning`: of the places that a unit could end
    at, up to an eighth before its limit, it ends at the last one of the least depth; what is left is shared evenly again.
    """
    total = len(lengths)
    if total == 0:
        return []
    share = _even(total, max_rows)
    sums = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    units: list[Range] = []
    start = 0
    while start < total:
        fits = int(np.searchsorted(sums, sums[start] + max_tokens, side="right")) - 1
        end = max(start + 1, min(fits, start + share, total))
        if depth is not None and end < total:
            least = end - (end - start) // SLACK
            early = end - int(np.argmin(depth[least : end + 1][::-1]))
            if early < end:
                end = early
                share = _even(total - end, max_rows)
        units.append((start, end))
        start = end
    return units


def _even(rows: int, max_rows: int) -> int:
    """Rows of each unit if so many are shared evenly among as few units as possible."""
    return -(-rows // -(-rows // max_rows))


def padding_efficiency(lengths: NDArray[np.int32], *, batch_rows: int) -> float:
    """Useful over computed tokens for rows in this order, in batches padded to their longest row; 1 if empty."""
    if len(lengths) == 0 or int(lengths.sum()) == 0:
        return 1.0
    batches = range(0, len(lengths), batch_rows)
    computed = sum(int(lengths[at : at + batch_rows].max()) * len(lengths[at : at + batch_rows]) for at in batches)
    return int(lengths.sum()) / computed
