"""The lane of a masked-diffusion model: its rows are tokens of canvases, of which a sample may run several at once.

With a cache the nodes of a sample share its slot; else each node has a slot of its own, in which nothing is kept.
"""

from __future__ import annotations

from typing import Any

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.engine.algorithm import Canvases
from draftmill.decoders.engine.memory import column_multiple
from draftmill.decoders.engine.token_lanes import TokenLane


class CanvasLane(TokenLane):
    """See the module's docstring."""

    def __init__(self, backbone: Any, info: ModelInfo, canvases: Canvases) -> None:
        super().__init__(backbone, info.vocab_size, is_target=True)
        if info.mask_id is None:
            raise ValueError(f"decoder.kind: models of family {info.family!r} have no mask to start from")
        self.mask_id, self.cached, self.conditioned = info.mask_id, canvases.cached, canvases.conditioned
        # On a CPU each node has its own columns, in the order of positions: only there bits are promised.
        self.by_node = canvases.cached and self.device.type == "cpu" and not getattr(backbone, "reads_rows", False)
        self._slots_each, self._multiple = canvases.num_slots, column_multiple(backbone)

    @property
    def can_capture(self) -> bool:
        """See Lane. Without a cache whole canvases run, which keep a device busy."""
        return self.cached

    @property
    def cell_bytes(self) -> int:
        """See Lane; with what a forward over whole canvases takes."""
        return super().cell_bytes + int(getattr(self.backbone, "row_bytes", 0))

    def resize(self, num_slots: int, num_columns: int) -> None:
        """See Lane; `num_columns` are those of all slots of a sample together."""
        super().resize(num_slots * self._slots_each, num_columns // self._slots_each // self._multiple * self._multiple)
