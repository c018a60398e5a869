"""Chooses by time how many drafts a sample of `ssd` takes, where each draft is one more canvas (`draft_length: auto`).

The budget of budget.py with two differences: a draft costs the rows of a node (a canvas or a window of it), whose number
depends on the sample; and with `tree: mixed` all drafts but the first bring a second node. The choice cannot change a text.

Legend: E = K + 1 choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from draftmill.decoders.engine.asks import Search
from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.lengths import BudgetLengths
from draftmill.decoders.engine.looks import Free, NodeOffer
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.survival import Counts, Numbers


class NodeBudget(DraftBudget):
    """Each step: `size` before `plan`. `nodes` are those beside the root for 0, 1, .. drafts."""

    def __init__(self, num_slots: int, nodes: Sequence[int]) -> None:
        super().__init__(num_slots, len(nodes) - 1)
        # A node's rows fill lines of their own.
        self._ragged = False
        self._nodes_E = np.array(nodes, dtype=np.float64)
        self._rows_BE: Numbers = np.zeros((0, len(nodes)))

    def size(self, offers: Sequence[NodeOffer]) -> None:
        """Set how many rows the root and the other nodes of each sample take in this step."""
        numbers_B = np.array(offers, dtype=np.float64).reshape(-1, len(NodeOffer._fields))
        root_B1, node_B1, whole_B1, refresh_at_B1 = (numbers_B[:, [field]] for field in range(1, 5))
        self._rows_BE = root_B1 + node_B1 * self._nodes_E
        refreshes_BE = (refresh_at_B1 >= 0) & (np.arange(len(self._nodes_E)) >= refresh_at_B1)
        self._rows_BE += refreshes_BE * (whole_B1 - node_B1)
        self._priced_rows = float(node_B1.mean())

    def _some(self, most: Counts, drafts: int, one_in: int) -> Counts:
        # A try costs a whole canvas, not a row: half as many give enough evidence.
        return super()._some(most, (drafts + 1) // 2, one_in)

    def _slot_rows(self, num_slots: int) -> Numbers:
        assert len(self._rows_BE) == num_slots, "the samples have not been sized for this step"
        return self._rows_BE


class NodeLengths(BudgetLengths):
    """See lengths.Lengths. `free` gives the columns a sample may take beside its canvas, among so many samples of
    at most this length.
    """

    def __init__(self, num_slots: int, nodes: Sequence[int], free: Callable[[int, int], int]) -> None:
        super().__init__()
        self.budget: NodeBudget = NodeBudget(num_slots, nodes)
        self._free = free

    def settle(self, samples: list[Sample], *, fresh: bool, joined: bool) -> None:
        """See Lengths."""
        slots, width = np.array([sample.slot for sample in samples]), max(sample.length for sample in samples)
        self._is_open = self.budget.open(fresh=False)
        free = Free(self._free(len(samples), width), width) if self._is_open else None
        for sample in samples:
            assert isinstance(sample.ask, Search), "a sample asks for its room in every round"
            sample.ask = sample.decoding.send(free)  # type: ignore[union-attr]
        if not self._is_open:
            # Drafts don't pay: the step is then that of the baseline.
            self.budget.plan(slots, np.zeros_like(slots), kv_tokens=0, fresh=False)
            return
        offers = [sample.ask for sample in samples if isinstance(sample.ask, NodeOffer)]
        assert len(offers) == len(samples), "all rounds begin together"
        self.budget.size(offers)
        kv = sum(sample.decided for sample in samples)
        most = np.array([offer.most for offer in offers])
        counts = self.budget.plan(slots, most, kv_tokens=kv, fresh=False).tolist()
        for sample, count in zip(samples, counts, strict=True):
            sample.ask = sample.decoding.send(count)  # type: ignore[union-attr]

    def ran(self, samples: list[Sample], rows: int, kv: int, seconds: float, *, is_usual: bool) -> None:
        """See Lengths."""
        self.budget.timed(rows, 0, seconds)
        self._learn(samples)
