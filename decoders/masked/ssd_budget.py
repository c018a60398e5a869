"""Chooses how many drafts `ssd` runs, where each draft is one more canvas (`draft_length: auto`).

The budget of engine/budget.py with two differences: a draft costs the rows of a node (a canvas or a window of it), whose number
depends on the slot; and with `tree: mixed` all drafts but the first bring a second node. The choice cannot change a text.

Legend: E = K + 1 choices.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from decoders.engine.budget import Counts, DraftBudget, Numbers
from decoders.engine.state import SlotState


def num_nodes(num_drafts: int, *, mixed: bool) -> int:
    """The number of nodes beside the root for a number of drafts."""
    return num_drafts + (max(num_drafts - 1, 0) if mixed else 0)


class NodeBudget(DraftBudget):
    """Each step: `size` before `plan`."""

    def __init__(self, state: SlotState, most: int, *, mixed: bool) -> None:
        super().__init__(state, most)
        # A node's rows fill lines of their own.
        self._ragged = False
        self._nodes_E = np.array([num_nodes(count, mixed=mixed) for count in range(most + 1)], dtype=np.float64)
        self._rows_BE: Numbers = np.zeros((0, most + 1))

    def size(self, root_B: Tensor, node_B: Tensor, whole_B: Tensor, refresh_at_B: Tensor | None) -> None:
        """Set how many rows each slot's root and each of its other nodes take in this step.

        The node with `refresh_at_B` drafts, if there is one, refreshes the cache and takes `whole_B` rows.
        """
        root_B1, node_B1, whole_B1 = (
            rows_B.to("cpu").double().numpy()[:, None] for rows_B in (root_B, node_B, whole_B)
        )
        self._rows_BE = root_B1 + node_B1 * self._nodes_E
        if refresh_at_B is not None:
            reaches_BE = np.arange(len(self._nodes_E)) >= refresh_at_B.cpu().numpy()[:, None]
            self._rows_BE += reaches_BE * (whole_B1 - node_B1)
        self._priced_rows = float(node_B1.mean())

    def _some(self, most: Counts, drafts: int, one_in: int) -> Counts:
        # A try costs a whole canvas, not a row: half as many give enough evidence.
        return super()._some(most, (drafts + 1) // 2, one_in)

    def _slot_rows(self, num_slots: int) -> Numbers:
        assert len(self._rows_BE) == num_slots, "the slots have not been sized for this step"
        return self._rows_BE
