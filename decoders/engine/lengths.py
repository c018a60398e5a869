"""Draft lengths that are chosen by time (`auto`): settles what samples offer, before the forward, and learns what it brought.

Each sample that may draft first yields SEARCH (is drafting worth looking for at all?), then an Offer of up to so many drafts.
All offers of a step are settled together by the budget (budget.py), since all samples share the forward.
"""

from __future__ import annotations

import numpy as np

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import SEARCH, Offer
from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.cost import CostTable
from draftmill.decoders.engine.samples import Sample


class Lengths:
    """Chooses how many drafts each sample takes; `has_drafter`: each draft costs a forward of a drafting model."""

    def __init__(self, num_slots: int, algorithm: Algorithm, *, has_drafter: bool) -> None:
        self._costs, self._drawing = CostTable() if has_drafter else None, CostTable()
        self.budget = DraftBudget(
            num_slots,
            algorithm.most_auto,
            rows=algorithm.auto_rows,
            forwards=algorithm.auto_forwards,
            drafter=self._costs,
            draft_forwards=algorithm.draft_forwards,
            drawing=self._drawing,
        )
        self._is_open = False

    def settle(self, samples: list[Sample], *, fresh: bool, joined: bool) -> None:
        """Answer the samples' questions until each of them asks for a forward."""
        is_open = self._is_open = self.budget.open(fresh=fresh)
        if not is_open:
            # Drafts don't pay: the step is then exactly that of the baseline.
            self.budget.pass_by()
        for sample in samples:
            if sample.ask is SEARCH:
                sample.ask = sample.decoding.send(int(is_open))  # type: ignore[union-attr]
        if not is_open or not any(isinstance(sample.ask, Offer) for sample in samples):
            # All are in the second forward of an iteration: what they draft is settled.
            return
        most = np.array([sample.ask.most if isinstance(sample.ask, Offer) else 0 for sample in samples])
        slots, kv = np.array([sample.slot for sample in samples]), sum(sample.decided for sample in samples)
        counts = self.budget.plan(slots, most, kv_tokens=kv, fresh=fresh, joined=joined).tolist()
        for sample, count in zip(samples, counts, strict=True):
            if isinstance(sample.ask, Offer):
                sample.ask = sample.decoding.send(count)  # type: ignore[union-attr]
            assert not isinstance(sample.ask, Offer), "an offer is followed by an ask"

    def drafted(self, rows: int, kv: int, seconds: float) -> None:
        """A forward of the drafting model, with its draws: its rows, and the columns that they read."""
        if self._costs is not None:
            self._costs.observe(rows, kv, seconds)

    def drew(self, num_samples: int, num_ranks: int, seconds: float) -> None:
        """Drafts were drawn without a forward, for so many samples and ranks of the one with the most."""
        self._drawing.observe(num_ranks, num_ranks * num_samples, seconds)

    def spent(self, seconds: float) -> None:
        """What all drafting before the target's forward took."""
        if self._is_open:
            self.budget.spent(seconds)

    def ran(self, samples: list[Sample], rows: int, kv: int, seconds: float, *, is_usual: bool) -> None:
        """The target's forward of the step is done; `just` of a sample says what an iteration brought that ended with it."""
        if is_usual:
            self.budget.timed(rows, kv, seconds)
        ended = [(sample.slot, *sample.just) for sample in samples if sample.just is not None]
        for sample in samples:
            sample.just = None
        if self._is_open and ended:
            self.budget.learn(*np.array(ended).T)
