"""Draws the tokens of a block: from which distribution, and with which of the sample's random numbers.

Under coupled acceptance a position has the same noise in all forwards, drafts and verifications, so its token is a function of
the distribution. Under the rejection rule every drafting forward draws new numbers. Knows nothing of blocks and schedules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.common_settings import Sampling
from decoders.draws import noise
from decoders.draws.sampling import coupled_draw, inverse_cdf_draw, log_law
from decoders.engine.kept_noise import PositionNoise
from decoders.engine.state import SlotState


class Draws:
    """Draws for all slots; `drafts_S` counts the drafting forwards of each sample."""

    def __init__(self, state: SlotState, drafts_S: Tensor, sampling: Sampling, vocab_size: int) -> None:
        self._state, self._drafts_S, self._sampling = state, drafts_S, sampling
        self.greedy, self.coupled = sampling.temperature == 0.0, sampling.acceptance == "coupled"
        # What routers and the public code use at temperature 0.
        self._warm = sampling.model_copy(update={"temperature": 1.0})
        self.noise = PositionNoise(state, vocab_size)

    def law(self, logits_RV: Tensor) -> Tensor:
        """The log-probabilities for drawing tokens and for confidences; at temperature 0 the model's own, in float64."""
        if self.greedy:
            return torch.log_softmax(logits_RV.to(torch.float64), dim=-1)
        return log_law(logits_RV, self._sampling)

    def warm_law(self, logits_RV: Tensor, law_RV: Tensor) -> Tensor:
        """The distribution (at temperature 0 that of temperature 1) after top-k and top-p."""
        if not self.greedy or (self._sampling.top_k is None and self._sampling.top_p is None):
            return law_RV
        return log_law(logits_RV.to(torch.float64), self._warm)

    def draw(self, law_RV: Tensor, slots_R: Tensor, positions_R: Tensor, purpose: int) -> Tensor:
        """Draw a token at each position, [R]; `purpose` names the random number under the rejection rule."""
        if self.greedy:
            return law_RV.argmax(-1)
        if self.coupled:
            return coupled_draw(law_RV, self.noise.rows(slots_R, positions_R))
        return inverse_cdf_draw(law_RV.exp(), self.uniform(slots_R, positions_R, purpose))

    def uniform(self, slots_R: Tensor, positions_R: Tensor, purpose: int) -> Tensor:
        """A random number for each position, a new one after every draft, float64 [R]."""
        return noise.uniform_rows(self._state.key_S2[slots_R], positions_R, purpose, self._drafts_S[slots_R])

    def accepting(self, slots_R: Tensor, positions_R: Tensor) -> Tensor:
        """The numbers that an acceptance ratio has to exceed, [R]."""
        return self.uniform(slots_R, positions_R, noise.ACCEPT)

    def recover(self, mass_RV: Tensor, slots_R: Tensor, positions_R: Tensor) -> Tensor:
        """Draw the tokens that replace rejected drafts, in proportion to mass, [R]."""
        return inverse_cdf_draw(mass_RV, self.uniform(slots_R, positions_R, noise.RESIDUAL))


def plain_log_p(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """Each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
    law_RV = torch.log_softmax(logits_RV, dim=-1)
    return law_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)


def entropy(law_RV: Tensor) -> Tensor:
    """The entropy of log-probabilities in nats, float64 [R]."""
    mass_RV = law_RV.exp()
    return -torch.where(mass_RV > 0, mass_RV * law_RV, 0.0).sum(-1).to(torch.float64)
