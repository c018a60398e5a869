"""The sampling settings of every slot: the job's, or a request's own (RowSettings).

While all slots use the job's settings, distributions and draws are computed with plain numbers. As soon as one slot has its own,
they are computed with one value per slot, for all rows at once; a row has the same bits either way. Knows no model and no
acceptance rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.base import RowSettings
from decoders.common_settings import Sampling
from decoders.draws.sampling import log_law, log_laws, nucleus_draw
from decoders.engine.state import SlotState


class Warps:
    """From logits to distributions, and from distributions to tokens, for all slots of a decoder.

    A coupled draw needs the nucleus in few rows only: it is found when a token is drawn, not with the distribution.
    """

    def __init__(self, state: SlotState, sampling: Sampling) -> None:
        self._coupled = sampling.acceptance == "coupled"
        self._job, self._top_p = sampling, sampling.top_p if self._coupled else None
        self._warp = sampling.model_copy(update={"top_p": None}) if self._top_p else sampling
        self._temperature_S, self._top_p_S = (state.column(dtype=torch.float64) for _ in range(2))
        # The slots whose requests have settings of their own.
        self._own: set[int] = set()

    def start(self, slot: int, settings: RowSettings) -> None:
        """Take the settings of a new sample in `slot`."""
        job = self._job
        temperature = job.temperature if settings.temperature is None else settings.temperature
        top_p = (job.top_p or 1.0) if settings.top_p is None else settings.top_p
        self._temperature_S[slot] = temperature
        self._top_p_S[slot] = top_p if top_p < 1.0 else torch.inf
        self._own.discard(slot)
        if temperature != job.temperature or top_p != (job.top_p or 1.0):
            self._own.add(slot)

    def move(self, source: int, target: int) -> None:
        """A sample moves from one slot to another; the columns of the SlotState move by themselves."""
        self._own.discard(target)
        if source in self._own:
            self._own.symmetric_difference_update((source, target))

    def release(self, slot: int) -> None:
        """A slot has become free."""
        self._own.discard(slot)

    def clear(self) -> None:
        """All slots have become free."""
        self._own.clear()

    @property
    def greedy(self) -> bool:
        """Whether no slot needs any noise."""
        return not self._own and self._job.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether every distribution is the model's own, not changed by temperature or cuts."""
        warp = self._warp
        return not self._own and warp.temperature == 1.0 and warp.top_k is None and warp.top_p is None

    def law(self, logits_RV: Tensor, slots_R: Tensor) -> Tensor:
        """The log-probabilities of suppressed logits, [R, V]; under coupled acceptance not yet cut to their nuclei."""
        if not self._own:
            return log_law(logits_RV, self._warp)
        temperature_R1 = self._temperature_S[slots_R].unsqueeze(1)
        top_p_R1 = None if self._coupled else self._top_p_S[slots_R].unsqueeze(1)
        return log_laws(logits_RV, temperature_R1, top_k=self._job.top_k, top_p_R1=top_p_R1)

    def draw(self, law_RV: Tensor, gumbel_RV: Tensor | None, slots_R: Tensor) -> Tensor:
        """The token of each row by its noise, [R]; at temperature 0 distributions are one-hot, so noise changes nothing."""
        if not self._own:
            return nucleus_draw(law_RV, gumbel_RV, self._top_p)
        return nucleus_draw(law_RV, gumbel_RV, self._top_p_S[slots_R].unsqueeze(1) if self._coupled else None)
