"""Chooses which masks of a drafted block a denoising step reveals. Pure functions over places.

    static       the most confident, as many as the step's share
    dynamic      all with confidence above tau, if that is at least the share; else as `static`
    sequential   the leftmost, as many as the share
    entropy      by ascending entropy, while the entropies before the last one sum up to at most tau; at least one

At least one mask is revealed while there is any, and none twice. Ties are broken from left to right.

Sources: SDAR and S2D2's public code (the first three); Ben-Hamu et al., "Accelerated sampling from masked diffusion models via
entropy bounded unmasking" (2025), section 4: the public code's version sums over the wrong axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Drafted(NamedTuple):
    """A drafted token: its log-probability under the model itself, its probability in the distribution that it was drawn from,

    and, where they are wanted, that distribution's entropy in nats and a router's measure of it.
    """

    token: int
    log_p: float
    sure: float
    entropy: float = 0.0
    worth: float = 0.0


Draft = Mapping[int, Drafted]
"""What a forward predicts for places of a block."""


def share(step: int, size: int, steps: int | None) -> int:
    """How many masks step number `step` is to reveal where `size` places take `steps` (None: one each)."""
    if steps is None or steps >= size:
        return 1
    return size // steps + (step < size % steps)


def choose(schedule: str, masks: list[int], share: int, draft: Draft, tau: float) -> list[int]:
    """Choose among the places of the masks, in the order of revealing; `share` is how many a step should; 0 reveals none."""
    if share <= 0 or not masks:
        return []
    if schedule == "sequential":
        return masks[:share]
    if schedule == "entropy":
        return _within(sorted(masks, key=lambda place: _number(draft[place].entropy)), draft, tau)
    if schedule == "dynamic":
        share = max(share, num_surer(masks, draft, tau))
    return sorted(masks, key=lambda place: -_number(draft[place].sure))[:share]


def num_surer(masks: list[int], draft: Draft, tau: float) -> int:
    """How many masks have a confidence strictly above tau."""
    return sum(draft[place].sure > tau for place in masks)


def _within(places: list[int], draft: Draft, tau: float) -> list[int]:
    """The first place, and those after it while the entropies before the last one sum up to at most tau."""
    spent = 0.0
    for count, place in enumerate(places):
        entropy = draft[place].entropy
        spent += entropy
        if count and not spent - entropy <= tau:
            return places[:count]
    return places


def _number(value: float) -> float:
    """0 for what is not a number."""
    return 0.0 if math.isnan(value) else value
