"""From the logits of rows to their distributions and tokens, under the job's sampling settings or a request's own.

While all samples use the job's settings, everything is computed with plain numbers; as soon as one has its own, with one value a
row. A row has the same bits either way. Knows no model, no noise and no acceptance rule.

Legend: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.base import RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.sampling import log_law, log_laws, nucleus_draw
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.kernels.choice_reference import Warp


class RowLaws:
    """The sampling settings of every slot, on the host."""

    def __init__(self, sampling: Sampling, num_slots: int) -> None:
        self._coupled = sampling.acceptance == "coupled"
        self._job = sampling
        # A coupled draw needs the nucleus in few rows only: it is found when a token is drawn, not with the distribution.
        self._nucleus = sampling.top_p if self._coupled else None
        self._warp = sampling.model_copy(update={"top_p": None}) if self._nucleus else sampling
        self._temperature_S, self._top_p_S = np.zeros(num_slots), np.zeros(num_slots)
        self._own: set[int] = set()

    def start(self, slot: int, settings: RowSettings) -> None:
        """Take the settings of a new sample in `slot`."""
        job, usual = self._job, self._job.top_p or 1.0
        temperature = job.temperature if settings.temperature is None else settings.temperature
        top_p = usual if settings.top_p is None else settings.top_p
        self._temperature_S[slot], self._top_p_S[slot] = temperature, top_p if top_p < 1.0 else np.inf
        self._own.discard(slot)
        if temperature != job.temperature or top_p != usual:
            self._own.add(slot)

    def release(self, slot: int) -> None:
        """A slot has become free."""
        self._own.discard(slot)

    @property
    def greedy(self) -> bool:
        """Whether no sample needs any noise."""
        return not self._own and self._job.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether every distribution is the model's own, not changed by temperature or cuts."""
        warp = self._warp
        return not self._own and warp.temperature == 1.0 and warp.top_k is None and warp.top_p is None

    def own(self, slot_R: Ints) -> NDArray[np.float64] | None:
        """Temperature and top-p of each row, [2, R], where any sample has settings of its own."""
        return self.each(slot_R) if self._own else None

    def each(self, slot_R: Ints) -> NDArray[np.float64]:
        """Temperature and top-p (infinite where nothing is cut) of each row, [2, R]."""
        return np.stack([self._temperature_S[slot_R], self._top_p_S[slot_R]])

    def law(self, logits_RV: Tensor, own_2R: Tensor | None) -> Tensor:
        """The log-probabilities of suppressed logits, [R, V]; under coupled acceptance not yet cut to their nuclei.

        `own_2R` is what `own` gave, on the device.
        """
        if own_2R is None:
            return log_law(logits_RV, self._warp)
        top_p_R1 = None if self._coupled else own_2R[1].unsqueeze(1)
        return log_laws(logits_RV, own_2R[0].unsqueeze(1), top_k=self._job.top_k, top_p_R1=top_p_R1)

    def cut(self, logits_RV: Tensor, own_2R: Tensor | None, plain_RV: Tensor) -> Tensor:
        """The log-probabilities of suppressed logits after all cuts, in the type of `plain_RV`, the model's own, [R, V].

        Rows of temperature 0 have the latter.
        """
        if own_2R is None:
            return log_law(logits_RV, self._job).to(plain_RV.dtype)
        cut_RV = log_laws(logits_RV, own_2R[0].unsqueeze(1), top_k=self._job.top_k, top_p_R1=own_2R[1].unsqueeze(1))
        return torch.where(own_2R[0].unsqueeze(1) == 0.0, plain_RV, cut_RV.to(plain_RV.dtype))

    def draw(self, law_RV: Tensor, gumbel_RV: Tensor | None, own_2R: Tensor | None) -> Tensor:
        """The token of each row by its noise, [R]; at temperature 0 distributions are one-hot, so noise changes nothing."""
        if own_2R is None:
            return nucleus_draw(law_RV, gumbel_RV, self._nucleus)
        return nucleus_draw(law_RV, gumbel_RV, own_2R[1].unsqueeze(1) if self._coupled else None)

    def log_p(self, logits_RV: Tensor, law_RV: Tensor | None, token_R: Tensor) -> Tensor:
        """Each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
        law = law_RV if self.plain and law_RV is not None else torch.log_softmax(logits_RV, dim=-1)
        return law.gather(-1, token_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)

    def cuts(self, slot_R: Ints) -> bool:
        """Whether top-p cuts the distribution of any of these rows."""
        return bool((self._top_p_S[slot_R] < 1.0).any())

    def warp(self, each_2R: Tensor, suppressed_V: Tensor, *, cuts: bool) -> Warp:
        """The settings of the rows' samples (`each`, on the device), as the kernels take them."""
        return Warp(each_2R[0], each_2R[1], cuts, self._job.top_k, suppressed_V)
