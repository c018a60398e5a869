"""Expands the spans of all samples to the rows of one forward, in numpy: columns, positions, visible intervals.

Legend: P spans, N rows, B samples, R answered rows, F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.asks import (
    ASKED,
    COLUMN,
    COUNT,
    DRAFT,
    FAR,
    FIELDS,
    FLOOR,
    GRAIN,
    KIND,
    LAG,
    NO_DRAFT,
    OWN,
    POSITION,
    RANK,
    SELF,
    TILL,
    WIDE,
)

Ints = NDArray[np.int64]


def repeated(starts: Ints, counts: Ints) -> Ints:
    """0 .. count-1 for each entry, one after the other; `starts` are the running sums before each entry."""
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)


class Table:
    """The spans of one forward, int64 [P, FIELDS], [P, WIDE] or [P, NODE_FIELDS] (looks.py), and the rows that they stand for.

    `rows_NF` holds each row's span, `step_N` its place in it, `owner_N` the sample (0 .. B-1) that it belongs to, `first_B` each
    sample's first row. `num_lines` is how many rows the sample with the most rows has.
    """

    __slots__ = (
        "first_B",
        "num_lines",
        "num_rows",
        "num_samples",
        "owner_N",
        "owner_P",
        "rows_NF",
        "spans_PF",
        "step_N",
    )

    def __init__(self, spans: Sequence[int] | Ints, owner_P: Ints, num_samples: int, *, fields: int = FIELDS) -> None:
        self.spans_PF: Ints = np.array(spans, dtype=np.int64).reshape(-1, fields)
        self.owner_P, self.num_samples = owner_P, num_samples
        count_P = self.spans_PF[:, COUNT]
        self.num_rows = int(count_P.sum())
        assert (self.spans_PF[:, ASKED] <= count_P).all(), "more rows are answered than run: `cached` is too high"
        assert (count_P > 0).all(), "a span without rows"
        if self.num_rows == len(self.spans_PF):
            self.rows_NF, self.owner_N = self.spans_PF, owner_P
            self.step_N: Ints = np.zeros(self.num_rows, dtype=np.int64)
        else:
            self.step_N = repeated(count_P.cumsum() - count_P, count_P)
            self.rows_NF, self.owner_N = np.repeat(self.spans_PF, count_P, axis=0), np.repeat(owner_P, count_P)
        rows_B = np.bincount(self.owner_N, minlength=num_samples)
        self.num_lines = int(rows_B.max())
        self.first_B: Ints = rows_B.cumsum() - rows_B

    def lines(self) -> Ints:
        """The number of each row among its sample's rows, [N]."""
        return np.arange(self.num_rows) - self.first_B[self.owner_N]

    def columns(self) -> Ints:
        """The column that each row writes, [N]."""
        return self.rows_NF[:, COLUMN] + self.step_N

    def positions(self) -> Ints:
        """The position of each row, [N]."""
        return self.rows_NF[:, POSITION] + self.step_N

    def intervals(self) -> tuple[list[Ints], list[Ints]]:
        """The stretches of columns that each row sees: from .. below .., [N] each."""
        if self.spans_PF.shape[1] > WIDE:
            used = int(self.spans_PF[:, WIDE + 2 :: 2].any(0).sum())
            sees_FN = self.rows_NF[:, WIDE + 1 : WIDE + 1 + 2 * used].T
            return list(sees_FN[::2]), list(sees_FN[1::2])
        column_N = self.columns()
        lows, highs, own_N = [np.zeros_like(column_N)], [self.limits(column_N)], self.own()
        if int(own_N.min()) < FAR:
            lows, highs = [*lows, own_N], [*highs, self.till(column_N)]
        return lows, highs

    def limits(self, column_N: Ints) -> Ints:
        """Each row sees the columns below its limit, [N]."""
        end_N = column_N + 1
        if self.is_wide:
            grain_N = self.rows_NF[:, GRAIN]
            end_N = (column_N // grain_N + 1) * grain_N
        return np.maximum(self.rows_NF[:, FLOOR], end_N - self.rows_NF[:, LAG])

    def own(self) -> Ints:
        """And those from here on, [N] ..."""
        own_N = self.rows_NF[:, OWN]
        return np.where(own_N == SELF, self.columns(), own_N) if self.is_wide else own_N

    def till(self, column_N: Ints) -> Ints:
        """... below here, [N]: up to its own column, or further."""
        return np.maximum(column_N + 1, self.rows_NF[:, TILL]) if self.is_wide else column_N + 1

    @property
    def is_wide(self) -> bool:
        """Whether the spans have a grain and an end of their own stretch."""
        return self.spans_PF.shape[1] >= WIDE

    def places(self, owner_N: Ints, row_N: Ints) -> Ints:
        """Where some samples' rows are among all rows, given by their number among the sample's rows, [N]."""
        return self.first_B[owner_N] + row_N

    def asked_places(self) -> Ints | None:
        """Where the answered rows are among all rows, [R]; None if they are all of them."""
        asked = self.step_N >= self.rows_NF[:, COUNT] - self.rows_NF[:, ASKED]
        return None if asked.all() else np.flatnonzero(asked)


@dataclass(frozen=True, slots=True)
class Asked:
    """The answered rows of one forward, sample after sample: slot, rank and kind of each, [R] each.

    `drafts_R` are the drafts that they judge, `owner_R` their samples (0 .. B-1), `size_B` how many rows each sample has and
    `when_B` how many of its tokens were decided when it asked.
    """

    slot_R: Ints
    rank_R: Ints
    kind_R: Ints
    drafts_R: Ints
    owner_R: Ints
    size_B: Ints
    when_B: Ints

    @classmethod
    def of(cls, table: Table, slot_B: Ints, drafts: Sequence[int], sizes: Sequence[int], whens: Sequence[int]) -> Asked:
        """The answered rows of a table."""
        asked_P = table.spans_PF[:, ASKED]
        assert int(asked_P.sum()) == len(drafts), "an ask has one draft entry for each answered row"
        owner_R: Ints = np.repeat(table.owner_P, asked_P)
        return cls(
            slot_R=slot_B[owner_R],
            rank_R=np.repeat(table.spans_PF[:, RANK], asked_P) + repeated(asked_P.cumsum() - asked_P, asked_P),
            kind_R=np.repeat(table.spans_PF[:, KIND], asked_P),
            drafts_R=np.array(drafts, dtype=np.int64),
            owner_R=owner_R,
            size_B=np.array(sizes, dtype=np.int64),
            when_B=np.array(whens, dtype=np.int64),
        )

    @classmethod
    def drafting(cls, slot_B: Ints, rank_B: Ints, when_B: Ints) -> Asked:
        """Rows that draft, one a sample."""
        ones = np.ones_like(slot_B)
        return cls(slot_B, rank_B, ones * DRAFT, ones * NO_DRAFT, np.arange(len(slot_B)), ones, when_B)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slot_R)

    @property
    def when_R(self) -> Ints:  # noqa: N802
        """How many tokens of each row's sample were decided when it asked."""
        return self.when_B[self.owner_R]

    def part(self, keep_R: NDArray[np.bool_]) -> tuple[Asked, Ints]:
        """Some rows as if no others had been asked for, all of a sample or none; and their samples."""
        samples = np.unique(self.owner_R[keep_R])
        owner_R = np.searchsorted(samples, self.owner_R[keep_R])
        kept = Asked(
            slot_R=self.slot_R[keep_R],
            rank_R=self.rank_R[keep_R],
            kind_R=self.kind_R[keep_R],
            drafts_R=self.drafts_R[keep_R],
            owner_R=owner_R,
            size_B=self.size_B[samples],
            when_B=self.when_B[samples],
        )
        return kept, samples


def count_leading(good_R: NDArray[np.bool_], size_B: Ints) -> Ints:
    """How many rows of each sample are good before the first that is not, [B]; there is at least one row."""
    some_B = size_B > 0
    if not some_B.all():
        leading_B = np.zeros_like(size_B)
        leading_B[some_B] = count_leading(good_R, size_B[some_B])
        return leading_B
    first_B = size_B.cumsum() - size_B
    step_R = repeated(first_B, size_B)
    worst_R = np.where(good_R, np.iinfo(np.int64).max, step_R)
    return np.minimum(np.minimum.reduceat(worst_R, first_B), size_B)
