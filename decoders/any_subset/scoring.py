"""The exact joint log-probability of any tokens of a text given all its others under an any-subset model, in one forward.

This is the density pass of ASSD, which verifies drafts with it: the content rows hold the text in decoding order, the given
tokens first, and the query at the rank of each scored token sees the columns before that rank.

    rank            0 .. prompt-1 | prompt .. length-2   | length-1
    content row     sees prompt   | sees itself and less | not run: nothing follows it
    query row       none          | sees the ranks before| sees the ranks before

The product of these conditionals is the joint: the order is the one in which every decoder of this room fills the same holes.

Source: Guo and Ermon, "Reviving any-subset autoregressive models via principled parallel sampling" (ASSD), on density estimation.
"""

from __future__ import annotations

import torch

from decoders.any_subset.decoder import AnySubsetDecoder
from decoders.any_subset.settings import AnySubsetSettings
from decoders.base import Request
from decoders.common_settings import Estimate
from decoders.engine.scores import ExactScorer
from decoders.engine.setup import Setup
from decoders.engine.state import Group


class AnySubsetScorer(ExactScorer, AnySubsetDecoder):
    """Scores tokens at any positions, given all the others; see decoders.base.Decoder."""

    def __init__(self, setup: Setup, settings: AnySubsetSettings, estimate: Estimate) -> None:
        """The scores of these models are exact, and depend neither on `settings` nor on `estimate`."""
        super().__init__(setup)

    def _start(self, slot: int, request: Request) -> None:
        self.backbone.set_order(slot, self._put(slot, request))

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        prompt_B, length_B = state.prompt_S[slots_B], state.length_S[slots_B]
        offsets_Q = torch.arange(int((length_B - prompt_B).max()), device=state.device)
        ranks_BQ = prompt_B.unsqueeze(1) + offsets_Q
        valid_BQ = ranks_BQ < length_B.unsqueeze(1)
        hidden_BQD = self._forward(group, length_B - 1, ranks_BQ, ranks_BQ, valid_BQ)
        tokens_BQ = state.tokens_SW[slots_B].gather(1, torch.where(valid_BQ, ranks_BQ, 0))
        # `_told` wants canvas order; the scored tokens' ranks are in that order.
        self._told(group, hidden_BQD[valid_BQ], tokens_BQ[valid_BQ])
