"""`stepwise`, `threshold` and `factor`: masked diffusion without speculation; they differ in masks per forward.

    stepwise    a schedule of tokens per step, or of steps; one token per step is the baseline that `ssd` equals
    threshold   all with confidence above a threshold, at least the most confident one
    factor      more at once need higher confidences: the largest n with (n + 1) (1 - c_n) < factor, c_n the n-th
                highest confidence, at least one

More than one token per forward is lossy: tokens revealed together do not see each other.

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025); Wu et al., "Fast-dLLM" (2025),
section 3.3.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from decoders.engine.setup import Setup
from decoders.engine.state import Group
from decoders.masked.decoder import RootDecoder
from decoders.masked.settings import FactorSettings, StepwiseSettings, ThresholdSettings

# The end time of Dream's schedule.
_LAST_TIME: Final = 1e-3


class Stepwise(RootDecoder):
    """Reveals by a schedule.

    `even`: `tokens_per_step` each time; or, with `steps`, every block takes its share of the steps and reveals equally many
    tokens in each; the first steps take the remainder. `dream`: as many as the linear time schedule of the model's training
    gives; with as many steps as masks, the first step reveals no token and the last one two.
    """

    def __init__(self, setup: Setup, settings: StepwiseSettings) -> None:
        super().__init__(setup, settings)
        self.settings = settings
        # Of the current block: its number plus one, its initial number of masks, and its steps so far.
        self._block_S, self._masks_S, self._steps_S = (self.state.column() for _ in range(3))

    def _knows_logprob(self) -> bool:
        return self.settings.steps is None and self.settings.tokens_per_step == 1

    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        if self.settings.steps is None:
            return most_B.clamp(max=self.settings.tokens_per_step)
        if self.settings.schedule == "dream":
            return dream_quota(most_B, self.state.iterations_S[group.index_B], self.settings.steps)
        return self._even_quota(group.index_B, most_B, self.settings.steps)

    def _even_quota(self, slots_B: Tensor, most_B: Tensor, steps: int) -> Tensor:
        # Every step reveals some masks of the block; if none of the last block remains, a new block starts.
        new_B = self._block_S[slots_B] == 0
        self._masks_S[slots_B] = torch.where(new_B, most_B, self._masks_S[slots_B])
        self._steps_S[slots_B] = torch.where(new_B, 0, self._steps_S[slots_B])
        share_B = (steps // self.canvas.num_blocks_S[slots_B]).clamp(min=1)
        masks_B, index_B = self._masks_S[slots_B], self._steps_S[slots_B]
        quota_B = masks_B // share_B + (index_B < masks_B % share_B)
        self._steps_S[slots_B] += 1
        self._block_S[slots_B] = (quota_B < most_B).to(torch.int64)
        return torch.minimum(quota_B, most_B)


def dream_quota(masks_B: Tensor, step_B: Tensor, steps: int) -> Tensor:
    """How many of the remaining masks step `step_B` of Dream's linear schedule reveals, [B]; all of them in the last."""
    times = torch.linspace(1.0, _LAST_TIME, steps + 1, device=masks_B.device)
    index_B = step_B.clamp(max=steps - 1)
    share_B = 1.0 - times[index_B + 1] / times[index_B]
    return torch.where(step_B >= steps - 1, masks_B, (masks_B * share_B).to(torch.int64))


class Threshold(RootDecoder):
    """Reveals all tokens above a confidence threshold."""

    def __init__(self, setup: Setup, settings: ThresholdSettings) -> None:
        super().__init__(setup, settings)
        self.tau = settings.tau

    def _knows_logprob(self) -> bool:
        return False

    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        return torch.minimum((sure_BW >= self.tau).sum(1).clamp(min=1), most_B)


class Factor(RootDecoder):
    """Reveals more tokens at once the higher their confidences are."""

    def __init__(self, setup: Setup, settings: FactorSettings) -> None:
        super().__init__(setup, settings)
        self.factor = settings.factor

    def _knows_logprob(self) -> bool:
        return False

    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        places_W = torch.arange(1, sure_BW.shape[1] + 1, device=sure_BW.device)
        good_BW = ((places_W + 1) * (1.0 - sure_BW) < self.factor) & (places_W <= most_B.unsqueeze(1))
        return (places_W * good_BW).amax(1).clamp(min=1)
