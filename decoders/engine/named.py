"""The rows that asks name one by one (asks.Named), of all samples of a forward, in numpy.

Legend: R answered rows, B samples, P spans, J rows that judge, C chains (samples with such rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.asks import COUNT, DRAFT, JUDGE, Named
from draftmill.decoders.engine.packing import Ints, Table, count_leading, repeated

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """One entry a row, [R] each, sample after sample; `size_B` rows of each. `place_R` are places in the flattened rectangle."""

    slot_R: Ints
    owner_R: Ints
    place_R: Ints
    position_R: Ints
    kind_R: Ints
    drafts_R: Ints
    cell_R: Ints
    sure_R: Floats
    first_R: Ints
    when_R: Ints
    number_R: Ints
    size_B: Ints

    @classmethod
    def of(cls, asks: Sequence[Named], table: Table, slot_B: Ints) -> NamedRows:
        """What each sample's ask names; `table` has its rows."""
        size_B = np.array([len(ask.rows) for ask in asks], dtype=np.int64)
        owner_R = np.repeat(np.arange(len(asks)), size_B)
        row_R = _joined([ask.rows for ask in asks])
        rows_B = np.bincount(table.owner_P, table.spans_PF[:, COUNT], table.num_samples).astype(np.int64)
        assert ((row_R >= 0) & (row_R < rows_B[owner_R])).all(), "an answered row does not run"
        position_R = _joined([ask.positions for ask in asks])
        first_R = np.array([ask.first for ask in asks], dtype=np.int64)[owner_R]
        assert (position_R >= first_R).all(), "a position before the first is asked about"
        return cls(
            slot_R=slot_B[owner_R],
            owner_R=owner_R,
            place_R=table.places(owner_R, row_R),
            position_R=position_R,
            kind_R=_joined([ask.kinds for ask in asks]),
            drafts_R=_joined([ask.drafts for ask in asks]),
            cell_R=_joined([ask.cells for ask in asks]),
            sure_R=np.fromiter(chain.from_iterable(ask.sures for ask in asks), dtype=np.float64, count=len(row_R)),
            first_R=first_R,
            when_R=np.array([ask.when for ask in asks], dtype=np.int64)[owner_R],
            number_R=np.array([ask.number for ask in asks], dtype=np.int64)[owner_R],
            size_B=size_B,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slot_R)

    @property
    def is_judged(self) -> Bools:
        """Which rows judge a draft, or follow drafts that do: those of the chains."""
        return self.kind_R == JUDGE

    @property
    def is_draft(self) -> Bools:
        """Which rows draft."""
        return self.kind_R == DRAFT

    @property
    def num_checked(self) -> int:
        """How many rows check tokens that may be committed now: not drafts beside a verification, which wait for the next one."""
        judged_R = self.is_judged
        has_chain_B = np.bincount(self.owner_R[judged_R], minlength=len(self.size_B)) > 0
        return int((judged_R | ~has_chain_B[self.owner_R]).sum())

    def chains(self) -> Chains:
        """The rows that judge, as one chain a sample."""
        rows_J = np.flatnonzero(self.is_judged)
        size_B = np.bincount(self.owner_R[rows_J], minlength=len(self.size_B))
        owner_C = np.flatnonzero(size_B)
        return Chains(rows_J, size_B[owner_C], owner_C)


@dataclass(frozen=True, slots=True)
class Chains:
    """`rows_J` are all rows that judge, `size_C` how many each chain has, `owner_C` its sample."""

    rows_J: Ints
    size_C: Ints
    owner_C: Ints

    def firsts(self) -> Ints:
        """The first row of each chain, among rows_J, [C]."""
        return self.size_C.cumsum() - self.size_C

    def steps(self) -> Ints:
        """Each row's place in its chain, [J]."""
        return repeated(self.firsts(), self.size_C)

    def numbers(self) -> Ints:
        """Each row's chain, [J]."""
        return np.repeat(np.arange(len(self.size_C)), self.size_C)

    def accepted(self, good_J: Bools, num_samples: int) -> Ints:
        """How many drafts of each sample are good before the first that is not; 0 for samples without a chain."""
        accepted_B: Ints = np.zeros(num_samples, dtype=np.int64)
        if len(self.rows_J):
            accepted_B[self.owner_C] = count_leading(good_J, self.size_C)
        return accepted_B


def _joined(lists: Sequence[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=sum(map(len, lists)))
