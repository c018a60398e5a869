"""What answers tell of a row's distribution besides its token: entropies, and measures of how likely a draft is accepted.

A measure is a formula of one number of the distribution, which the kernel of decoders/kernels/notes.py gives, too.

Source of the measures: Han et al., "Fast decoding for diffusion LLMs via training-free self-speculation" (S2D2, 2026).

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.kernels.notes_reference import Wanted


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
    return entropy_R / most_entropy(law_RV.shape[1])


def most_entropy(vocab_size: int) -> float:
    """log V, by which entropies are divided."""
    return max(math.log(vocab_size), 1e-12)


def worth(kind: str, parameter: float, law_RV: Tensor, token_R: Tensor) -> Tensor:
    """One of MEASURES of each row, float64 [R]; `token_R` are the tokens drawn."""
    of, formula = MEASURES[kind]
    return formula(_NUMBERS[of](law_RV, token_R), parameter).to(torch.float64)


def worth_of(kind: str, parameter: float, number_R: Tensor, vocab_size: int) -> Tensor:
    """One of MEASURES of each row, float64 [R], from the kernel's note that the measure is a formula of."""
    of, formula = MEASURES[kind]
    return formula(number_R / most_entropy(vocab_size) if of == "entropy" else number_R, parameter)


def _margin(law_RV: Tensor, token_R: Tensor) -> Tensor:
    best_R2 = law_RV.topk(2, dim=1).values.exp()
    return best_R2[:, 0] - best_R2[:, 1]


_NUMBERS: Final[dict[Wanted, Callable[[Tensor, Tensor], Tensor]]] = {
    "entropy": lambda law, token: normalised_entropy(law),
    "margin": _margin,
    "top1": lambda law, token: law.gather(1, token.unsqueeze(1)).squeeze(1).exp(),
    "squares": lambda law, token: law.exp().square().sum(1),
}
"""Of (log-probabilities [R, V], tokens [R]); the entropy is divided by its maximum."""

MEASURES: Final[dict[str, tuple[Wanted, Callable[[Tensor, float], Tensor]]]] = {
    "normalised_entropy": ("entropy", lambda number, _: number),
    "entropy": ("entropy", lambda number, beta: torch.exp(-beta * number)),
    "hard_entropy": ("entropy", lambda number, tau: (number < tau).to(number.dtype)),
    "margin": ("margin", lambda number, tau: (number > tau).to(number.dtype)),
    "linear_margin": ("margin", lambda number, coefficient: (coefficient * number).clamp(max=1.0)),
    "confidence": ("top1", lambda number, power: number.clamp(max=1.0) ** power),
    "renyi": ("squares", lambda number, _: number.clamp(max=1.0)),
}
"""By name, the number that it is a formula of, and the formula, of (the number [R], the measure's parameter)."""
