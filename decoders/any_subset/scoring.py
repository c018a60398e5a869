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
from torch import Tensor

from decoders.any_subset.settings import AnySubsetSettings
from decoders.backbones.base import Backbone, Rows
from decoders.backbones.visibility import content_limits
from decoders.base import Request
from decoders.common_settings import Estimate
from decoders.engine.scores import ExactScorer
from decoders.engine.setup import Setup
from decoders.engine.state import Group


class AnySubsetScorer(ExactScorer):
    """Scores tokens at any positions, given all the others; see decoders.base.Decoder."""

    backbone: Backbone

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
        hidden_BQD = self._forward(group, length_B - 1, torch.where(valid_BQ, ranks_BQ, 0), valid_BQ)
        tokens_BQ = state.tokens_SW[slots_B].gather(1, torch.where(valid_BQ, ranks_BQ, 0))
        # `_told` wants canvas order; the scored tokens' ranks are in that order.
        self._told(group, hidden_BQD[valid_BQ], tokens_BQ[valid_BQ])

    def _num_shared(self, slot: int) -> int:
        return int(self.state.prompt_S[slot])

    def _forward(self, group: Group, content_end_B: Tensor, ranks_BQ: Tensor, valid_BQ: Tensor) -> Tensor:
        """Run content columns [cached, content_end), and queries that see the ranks before theirs: hidden states [B, Q, D]."""
        state, slots_B = self.state, group.index_B
        start_B = state.cached_S[slots_B]
        num_content = int((content_end_B - start_B).max())
        offsets = torch.arange(num_content, device=state.device)
        valid_BC = offsets < (content_end_B - start_B).unsqueeze(1)
        columns_BC = torch.where(valid_BC, start_B.unsqueeze(1) + offsets, 0)
        limits_BC = content_limits(columns_BC, state.prompt_S[slots_B])
        rows = Rows(
            slots_B=slots_B,
            content_tokens_BC=state.tokens_SW[slots_B].gather(1, columns_BC),
            content_columns_BC=columns_BC,
            content_limits_BC=limits_BC,
            content_valid_BC=valid_BC,
            query_columns_BQ=ranks_BQ,
            query_limits_BQ=ranks_BQ,
            query_valid_BQ=valid_BQ,
            num_columns=max(int(limits_BC.max()) if num_content else 0, int(ranks_BQ.max())),
            num_positions=max(
                len(r.request.canvas) for slot in group.slots if (r := self._residents[slot]) is not None
            ),
        )
        hidden_BQD = self.counting.forward(rows, group.slots)
        state.cached_S[slots_B] = content_end_B
        return hidden_BQD
