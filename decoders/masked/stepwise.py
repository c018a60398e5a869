"""`stepwise`, `threshold` and `factor`: masked diffusion without speculation, by how many masks a forward reveals.

    stepwise    a schedule: so many a step, or so many steps; one a step is the baseline that `ssd` equals
    threshold   all of which the model is surer than a threshold, at least the one it is surest of
    factor      the more at once, the surer it must be of each: the largest n with (n + 1) (1 - c_n) < factor, c_n the n-th
                highest confidence, at least one

More than one a forward is lossy: what is revealed together does not see each other.

Sources: Nie et al., "Large language diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025); Wu et al., "Fast-dLLM" (2025),
section 3.3. Legend: B slots, W positions.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from decoders.engine.setup import Setup
from decoders.engine.state import Group
from decoders.masked.decoder import RootDecoder
from decoders.masked.settings import FactorSettings, StepwiseSettings, ThresholdSettings

# Where the time of Dream's schedule ends.
_LAST_TIME: Final = 1e-3


class Stepwise(RootDecoder):
    """Reveals by a schedule.

    `even`: `tokens_per_step` each time; or, with `steps`, every block takes its share of the steps, in each of which it reveals
    as many as in every other, one more in the first ones where that does not come out even. `dream`: as many as the time of the
    model's training has it, which is none in the first of as many steps as there are masks, and two in the last.
    """

    def __init__(self, setup: Setup, settings: StepwiseSettings) -> None:
        super().__init__(setup, settings)
        self.settings = settings
        # Of the block that is being revealed: its number plus one, its masks at first, and the steps it has had.
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
        # Within a block some are revealed in every step; none left of the last block means a new one.
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
    """How many of the masks left the step number `step_B` of Dream's linear schedule reveals, [B]; all of them in the last."""
    times = torch.linspace(1.0, _LAST_TIME, steps + 1, device=masks_B.device)
    index_B = step_B.clamp(max=steps - 1)
    share_B = 1.0 - times[index_B + 1] / times[index_B]
    return torch.where(step_B >= steps - 1, masks_B, (masks_B * share_B).to(torch.int64))


class Threshold(RootDecoder):
    """Reveals all that the model is sure enough of."""

    def __init__(self, setup: Setup, settings: ThresholdSettings) -> None:
        super().__init__(setup, settings)
        self.tau = settings.tau

    def _knows_logprob(self) -> bool:
        return False

    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        return torch.minimum((sure_BW >= self.tau).sum(1).clamp(min=1), most_B)


class Factor(RootDecoder):
    """Reveals the more, the surer the model is of all of it."""

    def __init__(self, setup: Setup, settings: FactorSettings) -> None:
        super().__init__(setup, settings)
        self.factor = settings.factor

    def _knows_logprob(self) -> bool:
        return False

    def _count_revealed(self, group: Group, sure_BW: Tensor, most_B: Tensor) -> Tensor:
        places_W = torch.arange(1, sure_BW.shape[1] + 1, device=sure_BW.device)
        good_BW = ((places_W + 1) * (1.0 - sure_BW) < self.factor) & (places_W <= most_B.unsqueeze(1))
        return (places_W * good_BW).amax(1).clamp(min=1)
