"""The log-linear noise schedule of MDLM and SEDD on the host: at time t a share (1 - eps) t of the tokens is masked.

A token is either itself or the mask, and *given that a masked position is revealed* the distribution of its token is the softmax
of its raw logits over the ids that are not the mask: MDLM by definition (SUBS), SEDD because sigma shifts all log-scores of a row
equally. So decoders that decide by themselves which positions to reveal need nothing from here except the noise that a network is
conditioned on. Pure: imports no torch.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024); Lou et al., "Discrete Diffusion Modeling by
Estimating the Ratios of the Data Distribution" (2024), absorbing graph, log-linear noise.
"""

from __future__ import annotations

import math
from typing import Final

NOISE_EPS: Final = 1e-3
"""At time 1 this share of the tokens is not masked."""

LAST_TIME: Final = 1e-5
"""The time at which the steps of `ancestral` end; the remaining masks are then revealed at once."""


def time_at(share: float) -> float:
    """The time at which a share of the tokens is masked, at most 1."""
    return min(share / (1 - NOISE_EPS), 1.0)


def total_noise(time: float) -> float:
    """Sigma at a time in [0, 1]: -log(1 - (1 - eps) t)."""
    return -math.log1p(-(1 - NOISE_EPS) * time)


def noise_of_share(share: float) -> float:
    """The total noise at which a share of the tokens is masked; at most that of time 1, the highest in training."""
    return -math.log1p(-min(share, 1 - NOISE_EPS))


def noise_rate(time: float) -> float:
    """The derivative of sigma by time."""
    return (1 - NOISE_EPS) / (1 - (1 - NOISE_EPS) * time)


def log_scale(sigma: float, vocab_size: int) -> float:
    """What is taken out of a logit to make it SEDD's log-score: the scale e^sigma - 1, and the number of tokens."""
    return math.log(math.expm1(sigma)) + math.log(vocab_size - 1)
