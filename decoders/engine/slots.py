"""What the host knows of the sample in each slot: its key, its decoding order, and its sampling settings.

Legend: S slots, W ranks.
"""

from __future__ import annotations

import numpy as np

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.engine.asks import Ints
from draftmill.decoders.engine.samples import Sample


class SlotTable:
    """`key_S2` are words of keys (noise.key_words). `order_SW` gives the position of each rank; None where that is the rank
    itself.

    `top_p_S` is infinite where nothing is cut. `own` are the slots whose samples have other settings than the job.
    """

    def __init__(self, sampling: Sampling, num_slots: int) -> None:
        self._job = sampling
        self.key_S2: Ints = np.zeros((num_slots, 2), dtype=np.int64)
        self.length_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self.order_SW: Ints | None = None
        self.temperature_S, self.top_p_S = np.zeros(num_slots), np.zeros(num_slots)
        self.own = set[int]()

    def start(self, sample: Sample) -> None:
        """A new sample has its slot."""
        slot, settings, job = sample.slot, sample.request.settings, self._job
        self.key_S2[slot], self.length_S[slot] = split_key(sample.key), sample.length
        usual = job.top_p or 1.0
        temperature = job.temperature if settings.temperature is None else settings.temperature
        top_p = usual if settings.top_p is None else settings.top_p
        self.temperature_S[slot], self.top_p_S[slot] = temperature, top_p if top_p < 1.0 else np.inf
        if temperature != job.temperature or top_p != usual:
            self.own.add(slot)
        if sample.order is not None:
            self._wider(sample.length)[slot, : sample.length] = sample.order

    def _wider(self, length: int) -> Ints:
        """The orders, with room for so many ranks."""
        held = self.order_SW
        if held is None or held.shape[1] < length:
            self.order_SW = np.zeros((len(self.length_S), length), dtype=np.int64)
            if held is not None:
                self.order_SW[:, : held.shape[1]] = held
        assert self.order_SW is not None, "orders have a table"
        return self.order_SW

    def release(self, slot: int) -> None:
        """A slot has become free."""
        self.own.discard(slot)
