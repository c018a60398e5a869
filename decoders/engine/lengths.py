"""Draft lengths that are chosen by time (`auto`): settles what samples offer, before the forward, and learns what it brought.

Each sample that may draft first yields a Search (is drafting worth looking for at all?), then an Offer of up to so many drafts.
All offers of a step are settled together by the budget (budget.py), since all samples share the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoders.engine.asks import Ask, Offer, Search
from decoders.engine.budget import DraftBudget
from decoders.engine.cost import CostTable
from decoders.engine.samples import Sample


class HostColumns:
    """Numbers a slot, kept on the host; what a budget knows of a sample moves with it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.device = num_slots, torch.device("cpu")
        self._columns: list[Tensor] = []

    def column(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Register and return a zeroed tensor [S, *shape]."""
        self._columns.append(torch.zeros(self.num_slots, *shape, dtype=dtype))
        return self._columns[-1]

    def start(self, slot: int) -> None:
        """Forget what the slot held."""
        for column in self._columns:
            column[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Carry a sample's numbers along."""
        for column in self._columns:
            column[target] = column[source]


class Lengths:
    """Settles the offers of every step; `has_drafter`: each draft costs a forward of a drafting model."""

    def __init__(self, num_slots: int, most: int, *, has_drafter: bool) -> None:
        self._columns = HostColumns(num_slots)
        self._costs = CostTable() if has_drafter else None
        columns: Any = self._columns
        self.budget = DraftBudget(columns, most, drafter=self._costs)
        self._is_open = False

    def start(self, slot: int) -> None:
        """A new sample."""
        self._columns.start(slot)

    def move(self, source: int, target: int) -> None:
        """A sample moves to another slot."""
        self._columns.move(source, target)

    def settle(self, samples: list[Sample], *, fresh: bool, joined: bool) -> None:
        """Answer the samples' questions until each of them asks for a forward."""
        is_open = self._is_open = self.budget.open(fresh=fresh)
        if not is_open:
            # Drafts don't pay: the step is then exactly that of the baseline.
            self.budget.pass_by()
        for sample in samples:
            if isinstance(sample.ask, Search):
                sample.ask = sample.decoding.send(int(is_open))  # type: ignore[union-attr]
        if not is_open:
            return
        most = [sample.ask.most if isinstance(sample.ask, Offer) else 0 for sample in samples]
        slots, kv = torch.tensor([sample.slot for sample in samples]), sum(sample.decided for sample in samples)
        counts = self.budget.plan(slots, torch.tensor(most), kv_tokens=kv, fresh=fresh, joined=joined).tolist()
        for sample, count in zip(samples, counts, strict=True):
            if isinstance(sample.ask, Offer):
                sample.ask = sample.decoding.send(count)  # type: ignore[union-attr]
            assert isinstance(sample.ask, Ask), "an offer is followed by an ask"

    def drafted(self, rows: int, kv: int, seconds: float) -> None:
        """A forward of the drafting model, with its draws."""
        if self._costs is not None:
            self._costs.observe(rows, kv, seconds)

    def spent(self, seconds: float) -> None:
        """What all drafting of the step took."""
        if self._is_open:
            self.budget.spent(seconds)

    def ran(self, samples: list[Sample], rows: int, kv: int, seconds: float, *, is_usual: bool) -> None:
        """The target's forward of the step is done, and every sample has closed an iteration."""
        if is_usual:
            self.budget.timed(rows, kv, seconds)
        if self._is_open:
            tried, gained = torch.tensor([sample.just for sample in samples]).unbind(1)
            self.budget.learn(torch.tensor([sample.slot for sample in samples]), tried, gained)
