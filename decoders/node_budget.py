"""How many drafts `ssd` runs when each of them is a canvas of its own. `draft_length: auto`.

The budget of budget.py with two differences: what a draft takes is a node's rows, a canvas or a window of it, which are the
slot's own; and with `tree: mixed` all drafts but the first bring a second node. Like there, what is chosen can't change a text.

Legend: B slots of this step, E = K + 1 choices.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from decoders.budget import DraftBudget, Numbers
from decoders.state import SlotState


def num_nodes(num_drafts: int, *, mixed: bool) -> int:
    """How many nodes so many drafts bring, beside the root."""
    return num_drafts + (max(num_drafts - 1, 0) if mixed else 0)


class NodeBudget(DraftBudget):
    """Each step: `size` before `plan`."""

    def __init__(self, state: SlotState, most: int, *, mixed: bool) -> None:
        super().__init__(state, most)
        self._nodes_E = np.array([num_nodes(count, mixed=mixed) for count in range(most + 1)], dtype=np.float64)
        self._root_B, self._node_B = np.zeros(0), np.zeros(0)

    def size(self, root_B: Tensor, node_B: Tensor) -> None:
        """Say how many rows each slot's root and each of its other nodes take in this step."""
        self._root_B, self._node_B = (rows_B.to("cpu").double().numpy() for rows_B in (root_B, node_B))
        self._priced_rows = float(self._node_B.mean())

    def _slot_rows(self, num_slots: int) -> Numbers:
        assert len(self._root_B) == num_slots, "the slots have not been sized for this step"
        rows_BE: Numbers = self._root_B[:, None] + self._node_B[:, None] * self._nodes_E
        return rows_BE
