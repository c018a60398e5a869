"""Log-probabilities of given tokens under a causal model: one forward a sample, nothing is generated.

column      0 .. from-2 | from-1 .. length-2 | length-1
its row     not asked   | scores column + 1  | not run
holds       given       | given              | the last scored token
"""

from __future__ import annotations

import torch

from decoders.backbones.base import TokenBackbone
from decoders.base import Request
from decoders.causal.decoder import rows_between
from decoders.causal.settings import AutoregressiveSettings
from decoders.common_settings import Estimate
from decoders.engine.scores import ExactScorer
from decoders.engine.setup import Setup
from decoders.engine.state import Group


class CausalScorer(ExactScorer):
    """Scores the end of a text, of which at least the first token is given; see decoders.base.Decoder."""

    backbone: TokenBackbone

    def __init__(self, setup: Setup, settings: AutoregressiveSettings, estimate: Estimate) -> None:
        """A causal model's scores are exact, and depend neither on `settings` nor on `estimate`."""
        super().__init__(setup)

    def _start(self, slot: int, request: Request) -> None:
        scored = request.to_score()
        if int(scored[0]) < 1 or len(request.canvas) - int(scored[0]) != len(scored):
            raise ValueError("a causal model scores the end of a text, after at least one given token")
        self._put(slot, request)

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        first_B, length_B = state.prompt_S[slots_B], state.length_S[slots_B]
        rows = rows_between(state, slots_B, torch.zeros_like(length_B), length_B - 1)
        hidden_BTD = self.counting.forward(rows, group.slots)
        asked_BT = rows.valid_BT & (rows.columns_BT + 1 >= first_B.unsqueeze(1))
        next_BT = state.tokens_SW[slots_B].gather(1, rows.columns_BT + 1)
        self._told(group, hidden_BTD[asked_BT], next_BT[asked_BT])
