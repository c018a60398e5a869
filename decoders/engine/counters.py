"""What an engine counts for the sample in each slot, and its totals: the only place where forwards are counted."""

from __future__ import annotations

from typing import Final

import numpy as np

from draftmill.decoders.base import EngineStats
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.samples import Spent

_FIRST_S, _DEVICE_S, _ACTIVE, _USED, _COMPUTED = range(5)
_FIELDS: Final = 5


class Counters:
    """A forward is charged to every slot that takes part: its rows to each, its seconds divided by the number of slots."""

    def __init__(self, num_slots: int, stats: EngineStats) -> None:
        self._counts_FS = np.zeros((_FIELDS, num_slots))
        self._stats = stats

    def start(self, slot: int) -> None:
        """Begin with a new sample."""
        self._counts_FS[:, slot] = 0.0

    def ran(self, slot_B: Ints, *, useful: int, computed: int, seconds: float, forwards_B: Ints | None = None) -> None:
        """Charge a forward of the target; its rows count. `forwards_B`: how often each slot takes part, by default once."""
        active = len(slot_B) if forwards_B is None else int(forwards_B.sum())
        each = np.array([[seconds / active], [active], [useful], [computed]])
        self._counts_FS[_DEVICE_S:, slot_B] += each if forwards_B is None else each * forwards_B
        self._stats.active_slot_steps += active
        self._stats.useful_rows += useful
        self._stats.computed_rows += computed
        self._stats.forward_s += seconds

    def first(self, slots: list[int], seconds: float) -> None:
        """Note the seconds of the first forward of these samples, or of a piece of their prompts, which belongs to it."""
        self._counts_FS[_FIRST_S, slots] += seconds

    def ran_ahead(self, slots: list[int], *, active: int) -> None:
        """What was charged for these samples was a forward of `active` samples, but no evaluation of theirs."""
        self._counts_FS[_ACTIVE, slots] -= active

    def drafted(self, slot_B: Ints, seconds: float) -> None:
        """Charge a forward of a drafting model; of it only the seconds count."""
        self._counts_FS[_DEVICE_S, slot_B] += seconds / len(slot_B)
        self._stats.forward_s += seconds

    def spent(self, slot: int) -> Spent:
        """What was counted for the sample in a slot."""
        first_s, device_s, active, used, computed = self._counts_FS[:, slot].tolist()
        return Spent(first_s, device_s, int(active), int(used), int(computed))
