"""Chooses which masks of a drafted block a denoising step reveals. Pure functions over blocks.

    static       the most confident, as many as the step's share
    dynamic      all with confidence above tau, if that is at least the share; else as `static`
    sequential   the leftmost, as many as the share
    entropy      by ascending entropy, while the entropies before the last one sum up to at most tau; at least one

At least one mask is revealed while there is any, and none twice. Ties are broken from left to right.

Sources: SDAR and S2D2's public code (the first three); Ben-Hamu et al., "Accelerated sampling from masked diffusion models via
entropy bounded unmasking" (2025), section 4: the public code's version sums over the wrong axis.

Legend: T places of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """The places of each block in the order of revealing, [B, T], and how many of them to reveal, [B]."""

    order_BT: Tensor
    counts_B: Tensor


def share(step_B: Tensor, size: int, steps: int | None) -> Tensor:
    """How many masks step number `step_B` is to reveal where `size` places take `steps` (None: one each), [B]."""
    if steps is None or steps >= size:
        return torch.ones_like(step_B)
    return size // steps + (step_B < size % steps).to(step_B.dtype)


def choose(
    schedule: str, masks_BT: Tensor, share_B: Tensor, *, sure_BT: Tensor, entropy_BT: Tensor, tau: float
) -> Choice:
    """Choose among the masks; `share_B` counts those that the step should reveal; 0 reveals none."""
    left_B = masks_BT.sum(1)
    if schedule == "sequential":
        return Choice(firsts(masks_BT), torch.minimum(share_B, left_B))
    if schedule == "entropy":
        order_BT = _ranked(-entropy_BT, masks_BT)
        spent_BT = torch.where(masks_BT, entropy_BT, torch.inf).gather(1, order_BT)
        fits_BT = (spent_BT.cumsum(1) - spent_BT <= tau) & masks_BT.gather(1, order_BT)
        counts_B = fits_BT.to(torch.int64).cumprod(1).sum(1).clamp(min=1)
        return Choice(order_BT, torch.minimum(torch.where(share_B > 0, counts_B, 0), left_B))
    counts_B = share_B
    if schedule == "dynamic":
        num_sure_B = num_surer(sure_BT, masks_BT, tau)
        counts_B = torch.where((share_B > 0) & (num_sure_B >= share_B), num_sure_B, share_B)
    return Choice(_ranked(sure_BT, masks_BT), torch.minimum(counts_B, left_B))


def num_surer(sure_BT: Tensor, masks_BT: Tensor, tau: float) -> Tensor:
    """How many masks of each block have a confidence strictly above tau, [B]."""
    return (masks_BT & (sure_BT > tau)).sum(1)


def firsts(marked_BT: Tensor) -> Tensor:
    """The marked places of each row from left to right, then the others, [B, T]."""
    return marked_BT.to(torch.int8).sort(dim=1, descending=True, stable=True).indices


def _ranked(worth_BT: Tensor, masks_BT: Tensor) -> Tensor:
    """The places in descending worth, masks before all others, ties from left to right."""
    worth_BT = worth_BT.nan_to_num(nan=0.0).masked_fill(~masks_BT, -torch.inf)
    return worth_BT.sort(dim=1, descending=True, stable=True).indices
