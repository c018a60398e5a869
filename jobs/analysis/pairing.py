"""Pairs the samples of two runs by (id, sample)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftmill.jobs.analysis.rows import RunRows, positions, row_numbers


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of samples that are ok in both runs: their positions in each run, and the number of each pair's row, from 0.

    `both` counts the pairs before failed ones are left out: `failed_first`, `failed_second` (failed in one run only) and
    `failed_both`. `only_first` and `only_second` count samples without a partner.
    """

    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]
    row_P: NDArray[np.int64]
    both: int
    only_first: int
    only_second: int
    failed_first: int
    failed_second: int
    failed_both: int

    @property
    def num_compared(self) -> int:
        """Pairs that are ok in both runs."""
        return len(self.first_P)

    @property
    def num_rows(self) -> int:
        """Distinct input rows of these pairs."""
        return int(self.row_P.max()) + 1 if len(self.row_P) else 0

    @property
    def clustered(self) -> bool:
        """Whether a row has several pairs, which are then not independent."""
        return self.num_rows < self.num_compared


def pair(first: RunRows, second: RunRows) -> Pairs:
    """The pairs of two runs, in the order of the first."""
    place, other = positions(first.ids, first.sample_N, second.ids, second.sample_N)
    ok, other_ok = first.ok_N[place], second.ok_N[other]
    good = ok & other_ok
    rows = row_numbers(first.ids, first.ids)[place[good]]
    return Pairs(
        first_P=place[good],
        second_P=other[good],
        row_P=np.unique(rows, return_inverse=True)[1].astype(np.int64),
        both=len(place),
        only_first=first.num_rows - len(place),
        only_second=second.num_rows - len(place),
        failed_first=int((~ok & other_ok).sum()),
        failed_second=int((ok & ~other_ok).sum()),
        failed_both=int((~ok & ~other_ok).sum()),
    )
