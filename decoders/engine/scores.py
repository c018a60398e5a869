"""Shared by the scorers of diffusion models, which generate nothing: a text in a slot, its tokens' log-probabilities.

    rank      0 .. prompt-1    | prompt .. length-1
    holds     the given tokens | the scored ones, in canvas order

The distribution is the model's own (temperature 1, no truncation), with ids that have no token left out, as in every decoder.
Legend: R scored rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from decoders.base import HOLE, Request
from decoders.common_settings import Sampling
from decoders.engine.setup import Setup
from decoders.engine.slots import SlotDecoder


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
