"""From the logits of rows to their distributions and tokens, under the job's sampling settings or a request's own.

While all samples use the job's settings, everything is computed with plain numbers; as soon as one has its own, with one value a
row. A row has the same bits either way. Knows no model, no noise and no acceptance rule.

Legend: R rows, V vocabulary, S slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decoders.base import RowSettings
from decoders.common_settings import Sampling
from decoders.draws.sampling import log_law, log_laws, nucleus_draw
from decoders.engine.packing import Ints
from decoders.engine.transfers import put
from decoders.kernels.choice_reference import Warp


class RowLaws:
    """The sampling settings of every slot, on the host."""

    def __init__(self, sampling: Sampling, num_slots: int, device: torch.device) -> None:
        self._coupled = sampling.acceptance == "coupled"
        self._job, self._device = sampling, device
        # A coupled draw needs the nucleus in few rows only: it is found when a token is drawn, not with the distribution.
        self._nucleus = sampling.top_p if self._coupled else None
        self._warp = sampling.model_copy(update={"top_p": None}) if self._nucleus else sampling
        self._temperature_S, self._top_p_S = np.zeros(num_slots), np.zeros(num_slots)
        self._own: set[int] = set()
        # The job's settings for so many rows, on the device; kernels take one value a row.
        self._job_2R = torch.zeros(2, 0, dtype=torch.float64, device=device)

    def start(self, slot: int, settings: RowSettings) -> None:
        """Take the settings of a new sample in `slot`."""
        job, usual = self._job, self._job.top_p or 1.0
        temperature = job.temperature if settings.temperature is None else settings.temperature
        top_p = usual if settings.top_p is None else settings.top_p
        self._temperature_S[slot], self._top_p_S[slot] = temperature, top_p if top_p < 1.0 else np.inf
        self._own.discard(slot)
        if temperature != job.temperature or top_p != usual:
            self._own.add(slot)

    def move(self, source: int, target: int) -> None:
        """Carry a sample's settings along."""
        for column_S in (self._temperature_S, self._top_p_S):
            column_S[target] = column_S[source]
        self._own.discard(target)
        if source in self._own:
            self._own.symmetric_difference_update((source, target))

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

    def law(self, logits_RV: Tensor, slot_R: Ints) -> Tensor:
        """The log-probabilities of suppressed logits, [R, V]; under coupled acceptance not yet cut to their nuclei."""
        if not self._own:
            return log_law(logits_RV, self._warp)
        top_p_R1 = None if self._coupled else self._column(self._top_p_S, slot_R)
        return log_laws(logits_RV, self._column(self._temperature_S, slot_R), top_k=self._job.top_k, top_p_R1=top_p_R1)

    def draw(self, law_RV: Tensor, gumbel_RV: Tensor | None, slot_R: Ints) -> Tensor:
        """The token of each row by its noise, [R]; at temperature 0 distributions are one-hot, so noise changes nothing."""
        if not self._own:
            return nucleus_draw(law_RV, gumbel_RV, self._nucleus)
        return nucleus_draw(law_RV, gumbel_RV, self._column(self._top_p_S, slot_R) if self._coupled else None)

    def log_p(self, logits_RV: Tensor, law_RV: Tensor, token_R: Tensor) -> Tensor:
        """Each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
        law = law_RV if self.plain else torch.log_softmax(logits_RV, dim=-1)
        return law.gather(-1, token_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)

    def warp(self, slot_R: Ints, suppressed_V: Tensor) -> Warp:
        """The settings of the rows' samples, as the kernels take them."""
        job, count = self._job, len(slot_R)
        if not self._own:
            if count > self._job_2R.shape[1]:
                usual = np.array([[job.temperature], [job.top_p or 1.0]])
                self._job_2R = put(usual.repeat(2 * count, 1), self._device)
            temperature_R, top_p_R = self._job_2R[:, :count]
            return Warp(temperature_R, top_p_R, (job.top_p or 1.0) < 1.0, job.top_k, suppressed_V)
        told_2R = np.stack([self._temperature_S[slot_R], self._top_p_S[slot_R]])
        temperature_R, top_p_R = put(told_2R, self._device)
        return Warp(temperature_R, top_p_R, bool((told_2R[1] < 1.0).any()), job.top_k, suppressed_V)

    def _column(self, values_S: np.ndarray[tuple[int], np.dtype[np.float64]], slot_R: Ints) -> Tensor:
        return put(values_S[slot_R], self._device).unsqueeze(1)
