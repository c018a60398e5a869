"""What answers tell of a row's distribution besides its token: entropies, and measures of how likely a draft is accepted.

Source of the measures: Han et al., "Fast decoding for diffusion LLMs via training-free self-speculation" (S2D2, 2026).

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor


def plain_log_p(logits_RV: Tensor, token_R: Tensor) -> Tensor:
    """Each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
    law_RV = torch.log_softmax(logits_RV, dim=-1)
    return law_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)


def entropy(law_RV: Tensor) -> Tensor:
    """The entropy of log-probabilities in nats, float64 [R]."""
    mass_RV = law_RV.exp()
    return -torch.where(mass_RV > 0, mass_RV * law_RV, 0.0).sum(-1).to(torch.float64)


def normalised_entropy(law_RV: Tensor) -> Tensor:
    """H / log V of log-probabilities over the whole vocabulary, between 0 and 1, [R]."""
    mass_RV = law_RV.exp()
    entropy_R = -torch.where(mass_RV > 0, mass_RV * law_RV, 0.0).sum(1)
    return entropy_R / max(math.log(law_RV.shape[1]), 1e-12)


def worth(kind: str, parameter: float, law_RV: Tensor, token_R: Tensor) -> Tensor:
    """One of MEASURES of each row, float64 [R]; `token_R` are the tokens drawn."""
    return MEASURES[kind](law_RV, token_R, parameter).to(torch.float64)


def _margin(law_RV: Tensor) -> Tensor:
    best_R2 = law_RV.topk(2, dim=1).values.exp()
    return best_R2[:, 0] - best_R2[:, 1]


def _confidence(law_RV: Tensor, token_R: Tensor) -> Tensor:
    return law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).exp().clamp(max=1.0)


MEASURES: Final = {
    "normalised_entropy": lambda law, token, _: normalised_entropy(law),
    "entropy": lambda law, token, beta: torch.exp(-beta * normalised_entropy(law)),
    "hard_entropy": lambda law, token, tau: (normalised_entropy(law) < tau).to(law.dtype),
    "margin": lambda law, token, tau: (_margin(law) > tau).to(law.dtype),
    "linear_margin": lambda law, token, coefficient: (coefficient * _margin(law)).clamp(max=1.0),
    "confidence": lambda law, token, power: _confidence(law, token) ** power,
    "renyi": lambda law, token, _: law.exp().square().sum(1).clamp(max=1.0),
}
"""By name, of (log-probabilities [R, V], tokens [R], the measure's parameter)."""
