"""Log-probabilities of given tokens under a causal model: one forward a sample, nothing is generated.

    column      0 .. from-2 | from-1 .. length-2 | length-1
    its row     not asked   | scores column + 1  | not run
    holds       given       | given              | the last scored token

The distribution is the model's own (temperature 1, no truncation), with ids that have no token left out, as in every decoder.
Legend: R scored rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.backbones.base import TokenBackbone
from decoders.base import ModelInfo, Outcome, Request
from decoders.causal.decoder import rows_between
from decoders.common_settings import Sampling
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident


class Scorer(SlotDecoder):
    """Scores canvases without holes from their `score_from` on; see decoders.base.Decoder."""

    backbone: TokenBackbone

    def __init__(self, backbone: TokenBackbone, info: ModelInfo, *, max_rows: int, max_tokens: int) -> None:
        super().__init__(
            Setup(backbone=backbone, info=info, sampling=Sampling(), max_rows=max_rows, max_tokens=max_tokens)
        )
        self._scores: dict[int, NDArray[np.float32]] = {}
        self._greedy_S = self.state.column(dtype=torch.bool)

    def _needs_slot(self, request: Request) -> bool:
        """Give each request a slot, although nothing is to be filled: scoring takes one forward."""
        return True

    def _start(self, slot: int, request: Request) -> None:
        first = request.score_from
        if first is None or not 1 <= first < len(request.canvas) or bool((request.canvas < 0).any()):
            raise ValueError("a text to score must have no holes, and a token before the first scored one")
        super()._start(slot, request)
        self.state.prompt_S[slot] = self.state.decided_S[slot] = first

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        first_B, length_B = state.decided_S[slots_B], state.length_S[slots_B]
        rows = rows_between(state, slots_B, torch.zeros_like(length_B), length_B - 1)
        hidden_BTD = self.counting.forward(rows, group.slots)
        asked_BT = rows.valid_BT & (rows.columns_BT + 1 >= first_B.unsqueeze(1))
        next_BT = state.tokens_SW[slots_B].gather(1, rows.columns_BT + 1)
        scores_R, first_choice_R = self._scores_of(hidden_BTD[asked_BT], next_BT[asked_BT])
        counts = (length_B - first_B).tolist()
        for slot, of_slot, are_first in zip(
            group.slots, scores_R.split(counts), first_choice_R.split(counts), strict=True
        ):
            self._scores[slot] = of_slot.to("cpu", torch.float32).numpy()
            state.logprob_S[slot] = of_slot.sum()
            self._greedy_S[slot] = are_first.all()
        state.decided_S[slots_B] = length_B
        self.stats.committed += len(next_BT[asked_BT])

    def _scores_of(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's log-probability, float64 [R], and whether it is the most likely one, bool [R]."""
        parts = [self._part(hidden_RD[part], tokens_R[part]) for part in self._parts(len(hidden_RD))]
        scores, first_choice = zip(*parts, strict=True)
        return torch.cat(scores), torch.cat(first_choice)

    def _part(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        law_RV = self._logits(hidden_RD).to(self.law_dtype).log_softmax(-1)
        scores_R = law_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return scores_R, law_RV.argmax(-1) == tokens_R

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        scores = self._scores.pop(slot)
        if outcome.error_kind is None:
            outcome.token_logprobs, outcome.is_greedy = scores, bool(self._greedy_S[slot])
        return outcome

    def clear(self) -> list[int]:
        """Free every slot; returns the indices of the requests that were inside."""
        self._scores.clear()
        return super().clear()
