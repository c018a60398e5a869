"""Shared by the scorers, which generate nothing: a text in a slot, its tokens' log-probabilities, exact scores from one forward.

    rank      0 .. prompt-1    | prompt .. length-1
    holds     the given tokens | the scored ones, in canvas order

The distribution is the model's own (temperature 1, no truncation), with ids that have no token left out, as in every decoder.
Legend: R scored rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.base import HOLE, Outcome, Request
from decoders.common_settings import Sampling
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder
from decoders.engine.state import Group, Resident


@dataclass(frozen=True, slots=True)
class Scores:
    """Each token's log-probability, float64 [R], and whether it is the most likely one, bool [R]."""

    log_p_R: Tensor
    is_first_R: Tensor


class Scorer(SlotDecoder):
    """A decoder whose canvases have no holes; see the module's docstring and decoders.base.Decoder."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, sampling=Sampling(), trace=False))

    def _needs_slot(self, request: Request) -> bool:
        """Give each request a slot, although it has no holes."""
        return True

    def _put(self, slot: int, request: Request) -> Tensor:
        """Put a text into its slot: the given tokens, then the scored ones; returns the position of each rank."""
        canvas = request.canvas.copy()
        canvas[request.to_score()] = HOLE
        order_L = self.state.start(slot, replace(request, canvas=canvas))
        tokens_L = torch.from_numpy(request.canvas.astype(np.int64)).to(self.state.device)
        self.state.tokens_SW[slot, : len(order_L)] = tokens_L[order_L]
        return order_L

    def _scores_of(self, hidden_RD: Tensor, tokens_R: Tensor) -> Scores:
        """The scores of tokens, each in its row, in parts whose logits fit into memory."""
        parts = [self._part(hidden_RD[part], tokens_R[part]) for part in self._parts(len(hidden_RD))]
        log_p, is_first = zip(*parts, strict=True)
        return Scores(torch.cat(log_p), torch.cat(is_first))

    def _part(self, hidden_RD: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        law_RV = self._logits(hidden_RD).to(self.law_dtype).log_softmax(-1)
        log_p_R = law_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return log_p_R, law_RV.argmax(-1) == tokens_R


class ExactScorer(Scorer):
    """Scores each text in its first and only forward."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._scores: dict[int, NDArray[np.float32]] = {}
        self._greedy_S = self.state.column(dtype=torch.bool)

    def _told(self, group: Group, hidden_RD: Tensor, tokens_R: Tensor) -> None:
        """Record the scores of all scored tokens of the group, slot after slot."""
        state, slots_B = self.state, group.index_B
        scores = self._scores_of(hidden_RD, tokens_R)
        counts = (state.length_S[slots_B] - state.prompt_S[slots_B]).tolist()
        parts = zip(group.slots, scores.log_p_R.split(counts), scores.is_first_R.split(counts), strict=True)
        for slot, log_p, is_first in parts:
            self._scores[slot] = log_p.to("cpu", torch.float32).numpy()
            state.logprob_S[slot] = log_p.sum()
            self._greedy_S[slot] = is_first.all()
        state.decided_S[slots_B] = state.length_S[slots_B]
        self.stats.committed += len(tokens_R)

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
