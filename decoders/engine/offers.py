"""Compares allocations of drafts to slots by expected gain and cost. Pure functions; see budget.py.

Legend: C allocations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.cost import Cost

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

# How much larger than all previous steps a step may be.
_GROWTH: Final = 2.0
# The speed-up that an unmeasured size must promise at best before it is tried.
_HOPE: Final = 1.1
# Where a ragged rectangle of rows may be cut, and what a copied slot costs in lines.
_CUTS, _COPY = (1, 2, 3, 5, 9), 8


def lines_a_slot(rows_CB: Counts) -> Numbers:
    """The average lines of attention per slot, given the rows of each slot, [C]; see attention.cut_ragged.

    The rectangle is as wide as the largest slot, or cut into a narrow one and copies of the slots that have more.
    """
    num_slots, most_C = rows_CB.shape[1], rows_CB.max(1)
    lines_C = most_C * num_slots
    for cut in _CUTS:
        num_more_C = (rows_CB > cut).sum(1)
        lines_C = np.where(
            num_more_C > 0, np.minimum(lines_C, cut * num_slots + num_more_C * (most_C - cut + _COPY)), lines_C
        )
    return lines_C / num_slots


@dataclass(frozen=True, slots=True)
class Offers:
    """Allocations with the gain and the cost of each; the last one drafts nothing."""

    counts_CB: Counts
    gain_C: Numbers
    rows_C: Numbers
    drafting_C: Numbers
    cost: Cost
    kv_C: Numbers

    def _rates(self, seconds_C: Numbers) -> Numbers:
        """Tokens per second; 0 for allocations much larger than any measured one."""
        near_C = self.rows_C <= max(_GROWTH * self.cost.most_tokens, self.rows_C[-1])
        return np.where(near_C, self.gain_C / (seconds_C + self.drafting_C), 0.0)

    def fastest(self, margin: float) -> tuple[Counts, float]:
        """The allocation with the most tokens per second, and its rate; no drafts if below `margin` times the plain rate."""
        rate_C = self._rates(self.cost.seconds(self.rows_C, self.kv_C))
        drafting_C = np.where(self.counts_CB.any(1), rate_C, 0.0)
        best = int(drafting_C.argmax())
        best = best if drafting_C[best] >= margin * rate_C[-1] else len(rate_C) - 1
        return self.counts_CB[best], float(rate_C[best])

    def hopeful(self, rate: float, otherwise: Counts) -> Counts:
        """An allocation of unmeasured size that might be much faster than `rate`, if there is one."""
        hope_C = self._rates(self.cost.at_least(self.rows_C, self.kv_C))
        best = int(hope_C.argmax())
        return self.counts_CB[best] if hope_C[best] > _HOPE * rate else otherwise

    def worth(self, rate: float) -> Counts:
        """The allocation with the largest gain after subtracting its time, valued at this rate."""
        seconds_C = self.cost.per_token * self.rows_C + self.drafting_C
        return self.counts_CB[int((self.gain_C - rate * seconds_C).argmax())]
