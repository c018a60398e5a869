"""`specdiff`: speculative decoding with a masked-diffusion model as the drafter.

The loop is that of `speculative`. The drafts come from diffusion_drafter.py: many in few forwards, since a diffusion model
fills all masks at once. So drafts are long, and their cost depends on the steps rather than on their number. With a draft
head they are drawn one after the other, each given those before it.

Source: Christopher et al., "Speculative Diffusion Decoding" (2025).
"""

from __future__ import annotations

from typing import Final

from decoders.causal.diffusion_drafter import DiffusionDrafter, Revealing
from decoders.causal.draft_and_verify import DraftAndVerify
from decoders.causal.settings import SpecDiffSettings
from decoders.engine.budget import DraftBudget
from decoders.engine.cost import CostTable
from decoders.engine.setup import Setup

MOST_AUTO: Final = 48
"""The most drafts that `auto` gives to a slot; the paper's best are 30 to 45."""


class SpecDiff(DraftAndVerify):
    """`drafter` is the diffusion model, `drafter_info` describes it, `heads` (or None) is its draft head.

    Raises ValueError if `window: full` is impossible with it.
    """

    def __init__(self, setup: Setup, settings: SpecDiffSettings) -> None:
        super().__init__(setup, settings.gamma, most_auto=MOST_AUTO)
        drafter, drafter_info, heads = setup.drafter, setup.drafter_info, setup.heads
        assert drafter is not None and drafter_info is not None, "decoder.drafter names a model, but none was loaded"
        settings.check_drafter(drafter_info)
        open_ended = settings.gamma == "auto"
        revealing = Revealing(settings.steps, None if open_ended else self.k, settings.order)
        costs, drawing = (CostTable(), CostTable()) if open_ended else (None, None)
        self.drafter = DiffusionDrafter(
            drafter,
            drafter_info,
            self.state,
            self._draw_draft,
            revealing=revealing,
            full=settings.window == "full",
            vocab_size=self.info.vocab_size,
            keep_laws=not self.acceptance.coupled,
            head=None if heads is None else heads.markov,
            costs=costs,
            drawing=drawing,
        )
        if open_ended:
            forwards = revealing.forwards(self.k)
            self.budget = DraftBudget(self.state, self.k, drafter=costs, draft_forwards=forwards, drawing=drawing)
