"""Shared by the trainings of draft heads: the schedule, the two losses, the loop.

A head learns to predict like the target: KL(p, q) first, and in the last part of the training -log sum_v min(p(v),
q(v)), which is minus the log of the acceptance of speculative sampling itself (Leviathan et al. 2023, section 3). Knows neither
models nor heads.

Legend: N = rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadSchedule:
    """How long and how fast to train, in optimiser steps; the last `acceptance_share` of them is for the acceptance."""

    steps: int = 1400
    seed: int = 0
    learning_rate: float = 2e-3
    warmup: int = 50
    acceptance_share: float = 1 / 3

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, constant to the half, then linear to zero."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup, 2 * (self.steps - step) / self.steps)

    def by_acceptance(self, step: int) -> bool:
        """Whether a step uses the acceptance loss."""
        return step >= self.steps * (1 - self.acceptance_share)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Probability [N] that a draft from q is accepted against p: sum_v min(p(v), q(v))."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def head_loss(log_p: Tensor, log_q: Tensor, *, by_acceptance: bool) -> Tensor:
    """Mean over rows of KL(p, q), or of minus the log of the acceptance; both distributions have the same impossible tokens."""
    if by_acceptance:
        return -acceptance(log_p, log_q).clamp_min(1e-6).log().mean()
    # Ids that are -inf in both count 0; 0 * (-inf) would be NaN.
    difference = (log_p - log_q).nan_to_num(nan=0.0)
    return (log_p.exp() * difference).sum(-1).mean()


def fit_heads(
    heads: nn.Module,
    schedule: HeadSchedule,
    step_loss: Callable[[int], Tensor],
    report: Callable[[int, float], None],
) -> None:
    """Train `heads` in place: AdamW on `step_loss(step)`; `report(step, loss)` after every step."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = step_loss(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step + 1, float(loss.detach()))
    heads.eval()
