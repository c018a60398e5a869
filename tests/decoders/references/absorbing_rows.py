"""How likely a mask is revealed in a step back in time (MDLM, SEDD), for rows: beside draws/schedule.py and masked/ancestral.py.

Sources: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (2024), SUBS parameterisation; Lou et al.,
"Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution" (2024), absorbing graph, log-linear noise.

Legend: V vocabulary (the mask included).
"""

import math

import torch
from torch import Tensor

from draftmill.decoders.draws.schedule import NOISE_EPS


def total_noise(time: Tensor) -> Tensor:
    """Sigma at a time in [0, 1]: -log(1 - (1 - eps) t)."""
    return -torch.log1p(-(1 - NOISE_EPS) * time)


def chance_by_time(time: Tensor, later: Tensor) -> Tensor:
    """How likely a mask of `time` is revealed until `later` (nearer to 0), whatever the model says: (m_t - m_s) / m_t (MDLM)."""
    return 1.0 - later / time


def chance_by_scores(log_scores_RV: Tensor, mask_id: int, euler: bool, time_R: Tensor, later_R: Tensor) -> Tensor:
    """How likely each mask is revealed from `time_R` to `later_R` by SEDD: as much as its scores sum to, [R], at most 1.

    The analytic predictor scales the scores by e^(sigma - sigma') - 1, Euler's by the time between them and the noise's rate.
    Scores that are too large would leave the mask a negative probability; then it is revealed.
    """
    others = torch.full((1,), mask_id, dtype=torch.int64, device=log_scores_RV.device)
    total_R = log_scores_RV.index_fill(-1, others, -torch.inf).logsumexp(-1).exp()
    if euler:
        rate_R = (1 - NOISE_EPS) / (1 - (1 - NOISE_EPS) * time_R)
        scale_R = (time_R - later_R) * rate_R
    else:
        scale_R = torch.expm1(total_noise(time_R) - total_noise(later_R))
    return (scale_R * total_R).clamp(max=1.0)


def log_scores(logits_RV: Tensor, tokens_R: Tensor, sigma_R: Tensor) -> Tensor:
    """SEDD's log s of every row and token, the ratio of the token's probability to that of the row's own; [R, V].

    The scale e^sigma - 1 and the number of tokens are taken out of the logits (`scale_by_sigma`); the own token's is 0.
    """
    scale_R1 = log_scale(sigma_R.to(logits_RV.dtype), logits_RV.shape[-1]).unsqueeze(1)
    return (logits_RV - scale_R1).scatter(-1, tokens_R.unsqueeze(1), 0.0)


def log_scale(sigma_R: Tensor, vocab_size: int) -> Tensor:
    """What is taken out of logits to make them SEDD's log-scores, [R]."""
    return torch.expm1(sigma_R).log() + math.log(vocab_size - 1)
